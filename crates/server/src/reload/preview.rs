//! Previews the changes that another rules file would make.

use tidegate_config::{Config, Mistake};
use tidegate_core::RuleSet;

use super::{Reloader, diff::RulesDiff};

/// The changes that another rules file would make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesPreview {
    /// The number of rules in the file.
    pub rules: usize,
    /// The differences from the active rules.
    pub diff: RulesDiff,
    /// The settings that would need a restart.
    pub restart_required: Vec<&'static str>,
    /// The warnings for the file.
    pub warnings: Vec<Mistake>,
}

/// Returns the changes that a reload would make to the `current` rules and settings if the rules
/// file contained `text`.
///
/// # Errors
///
/// Returns one line for each problem that would make a reload reject the file. The files that
/// `text` names, such as certificates and candidate rules, are not read.
pub fn preview(
    current: &RuleSet,
    reloader: Option<&Reloader>,
    text: &str,
) -> Result<RulesPreview, Vec<String>> {
    let lines = |mistakes: Vec<Mistake>| -> Vec<String> {
        mistakes.iter().map(Mistake::to_string).collect()
    };
    let mut config = Config::parse_file(text).map_err(lines)?;
    let (rules, warnings) = (
        std::mem::take(&mut config.rules),
        std::mem::take(&mut config.warnings),
    );
    let restart_required = match reloader {
        Some(reloader) => reloader.check(&config).map_err(|error| error.problems())?,
        None => Vec::new(),
    };
    Ok(RulesPreview {
        rules: rules.len(),
        diff: RulesDiff::between(current, &rules),
        restart_required,
        warnings,
    })
}
