//! Reads envoyproxy/ratelimit's configuration files, with Tidegate's extensions.
//!
//! All files are read as one configuration: if any file has an error, no file takes effect. All
//! errors in all files are reported together, each with its path and line. If envoyproxy/ratelimit
//! has the same error, the message is the same.

mod descriptor;
mod expression;
mod fields;
mod key_joining;
mod keys;
mod limit;
mod limitador;
mod metadata;
mod scalar;

use std::{collections::HashMap, fmt};

pub use self::limitador::read_limitador;

use super::rules::{ChargeMode, Domains};
use descriptor::DescriptorReader;
use tidegate_config::{
    MAX_FILE_BYTES, Mistake,
    envoy::DomainFiles,
    report::{self, Report},
    value::{Shape, Value},
    yaml::{self, YamlDialect, YamlDocument},
};

/// A configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// The file name in messages.
    pub name: String,
    /// The content of the file.
    pub text: String,
}

/// An error in a configuration file, or in a resource from a control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileMistake {
    /// The name of the file or resource.
    pub file: String,
    /// The position in the file and the description.
    pub mistake: Mistake,
}

/// Formats an error, for example as
/// `shop.yaml: descriptors[0].rate_limit.unit (line 5): invalid rate limit unit 'fortnight'`.
impl fmt::Display for FileMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.file.is_empty() {
            write!(f, "{}: ", self.file)?;
        }
        self.mistake.fmt(f)
    }
}

/// The maximum number of errors that are listed for all files or resources together. There can be
/// 10,000 of them, and the status document contains the list.
const MAX_FILE_MISTAKES: usize = 1_000;

/// The errors in all files or resources.
#[derive(Debug, Default)]
pub(crate) struct FileMistakes {
    listed: Vec<FileMistake>,
    unlisted: usize,
}

impl FileMistakes {
    /// Adds an error.
    pub(crate) fn push(&mut self, mistake: FileMistake) {
        if self.listed.len() < MAX_FILE_MISTAKES {
            self.listed.push(mistake);
        } else {
            self.unlisted += 1;
        }
    }

    /// Adds the errors in the report about `file`. Returns the warnings, if there are no errors.
    fn add_report(&mut self, file: &str, report: Report) -> Vec<FileMistake> {
        let count = report.count();
        let of_file = |mistake| of_file(file, mistake);
        match report.finish() {
            Ok(warnings) => warnings.into_iter().map(of_file).collect(),
            Err(found) => {
                let before = self.listed.len();
                // The report lists as many errors as this list, followed by the number of others.
                let room = MAX_FILE_MISTAKES - before;
                self.listed
                    .extend(found.into_iter().map(of_file).take(room));
                self.unlisted += count - (self.listed.len() - before);
                Vec::new()
            }
        }
    }

    /// Returns `loaded` if there are no errors.
    fn finish(mut self, loaded: LoadedConfig) -> Result<LoadedConfig, Vec<FileMistake>> {
        if self.listed.is_empty() {
            return Ok(loaded);
        }
        if let Some(message) = report::more_errors(self.unlisted) {
            // This error belongs to no file.
            self.listed.push(of_file("", message));
        }
        Err(self.listed)
    }
}

/// The loaded rules, with warnings about the files.
#[derive(Debug, Default)]
pub struct LoadedConfig {
    pub(super) domains: Domains,
    /// Warnings about settings that are valid but probably do not have the intended effect.
    pub warnings: Vec<FileMistake>,
}

impl LoadedConfig {
    /// Returns the number of domains.
    #[must_use]
    pub fn domains(&self) -> usize {
        self.domains.len()
    }
}

/// Reads `files`, sorted by name, as one configuration.
///
/// # Errors
///
/// Returns the errors in all files, of which at most 1,000 are listed. The list of errors is never
/// empty.
///
/// # Examples
///
/// ```
/// use tidegate_config::envoy::DomainFiles;
/// use tidegate_envoy::{File, read};
///
/// let file = |text: &str| vec![File { name: "shop.yaml".into(), text: text.into() }];
/// let sound = file(
///     "domain: shop\ndescriptors: \
///      [{key: user, rate_limit: {unit: minute, requests_per_unit: 3}}]",
/// );
/// assert_eq!(read(sound, DomainFiles::One).unwrap().domains(), 1);
///
/// let wrong = file("domain: shop\ndescriptors: [{key: user, rate_limit: {unit: moon}}]");
/// let mistakes = read(wrong, DomainFiles::One).unwrap_err();
/// assert!(mistakes[0].to_string().starts_with(
///     "shop.yaml: descriptors[0].rate_limit.unit (line 2): invalid rate limit unit 'moon'"
/// ));
/// ```
pub fn read(mut files: Vec<File>, merging: DomainFiles) -> Result<LoadedConfig, Vec<FileMistake>> {
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let mut mistakes = FileMistakes::default();
    let mut documents = Vec::with_capacity(files.len());
    for file in &files {
        match document(&file.text) {
            Ok(document) => documents.push((file.name.as_str(), document)),
            Err(mistake) => mistakes.push(of_file(&file.name, mistake)),
        }
    }
    interpret(&documents, merging, mistakes)
}

/// Reads the `documents`, sorted by name, as one configuration. Each document is named after its
/// file or resource. `mistakes` contains the errors in files that could not be parsed into
/// documents.
///
/// # Errors
///
/// Returns the errors, of which at most [`MAX_FILE_MISTAKES`] are listed. The list of errors is
/// never empty.
pub(crate) fn interpret(
    documents: &[(&str, YamlDocument<'_>)],
    merging: DomainFiles,
    mut mistakes: FileMistakes,
) -> Result<LoadedConfig, Vec<FileMistake>> {
    let mut loaded = LoadedConfig::default();
    let charging = charging(documents);
    let mut first_files = HashMap::new();
    for (file, document) in documents {
        let mut report = Report::default();
        document
            .warnings
            .iter()
            .for_each(|warning| report.warn(warning.clone()));
        let root = Value::root(&document.root);
        let reader = DescriptorReader {
            charging: &charging,
            merging,
            first_files: &mut first_files,
            file,
        };
        reader.read(&root, &mut loaded.domains, &mut report);
        loaded.warnings.extend(mistakes.add_report(file, report));
    }
    mistakes.finish(loaded)
}

fn document(text: &str) -> Result<YamlDocument<'_>, Mistake> {
    let wrong = |line, message: String| Mistake {
        path: String::new(),
        line,
        message: format!("error loading config file: {message}"),
    };
    if text.len() > MAX_FILE_BYTES {
        return Err(wrong(
            None,
            format!(
                "the file has {} bytes, which exceeds the maximum of {MAX_FILE_BYTES}",
                text.len()
            ),
        ));
    }
    let document = yaml::parse(text, YamlDialect::Lenient)
        .map_err(|mistake| wrong(mistake.line, mistake.message))?;
    match Value::root(&document.root).shape() {
        Shape::List => Err(wrong(
            Some(1),
            "expected a map with a domain, got a list".into(),
        )),
        Shape::Scalar | Shape::Map => Ok(document),
    }
}

/// Returns each domain's charge mode. `all_or_nothing` takes effect for a domain if any of the
/// domain's files sets it.
fn charging(documents: &[(&str, YamlDocument<'_>)]) -> HashMap<String, ChargeMode> {
    let mut charging = HashMap::new();
    for (_, document) in documents {
        let root = Value::root(&document.root);
        let domain = fields::text_of(&root, "domain")
            .unwrap_or_default()
            .to_owned();
        if descriptor::is_all_or_nothing(&root) {
            charging.insert(domain, ChargeMode::AllOrNothing);
        }
    }
    charging
}

pub(crate) fn of_file(file: &str, mistake: Mistake) -> FileMistake {
    FileMistake {
        file: file.to_owned(),
        mistake,
    }
}
