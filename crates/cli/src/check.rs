//! `check`: what `serve` would make of the files, without serving.

use std::{path::Path, process::ExitCode};

use tidegate_server::{
    envoy::{DomainFiles, Folder, FolderError},
    reload::{self, LoadError},
};

use crate::{NO, answer, args::Check, complain};

/// Reads what is named as `serve` would: yes if it could serve, no with every mistake if not.
///
/// # Errors
///
/// What hinders it from reading.
pub(crate) fn check(args: &Check) -> Result<ExitCode, String> {
    let mut sound = true;
    if let Some(file) = &args.file {
        sound &= check_file(file)?;
    }
    if let Some(path) = &args.envoy {
        let merging = if args.merge_domains {
            DomainFiles::Merged
        } else {
            DomainFiles::One
        };
        sound &= check_envoy(&Folder {
            path: path.clone(),
            merging,
        })?;
    }
    Ok(if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NO)
    })
}

/// A rules file, and the rules for Envoy to which it leads.
fn check_file(file: &Path) -> Result<bool, String> {
    match reload::load(file) {
        Ok(config) => {
            config.warnings.iter().for_each(warn);
            answer(&format!(
                "{}: {}, no mistakes",
                file.display(),
                counted(config.rules.len(), "rule")
            ));
            config
                .envoy
                .map_or(Ok(true), |envoy| check_envoy(&envoy.folder))
        }
        Err(error @ LoadError::Mistaken { .. }) => {
            complain(&error.to_string());
            Ok(false)
        }
        Err(error) => Err(error.to_string()),
    }
}

fn check_envoy(folder: &Folder) -> Result<bool, String> {
    match folder.load() {
        Ok(loaded) => {
            loaded.warnings.iter().for_each(warn);
            answer(&format!(
                "{}: {}, no mistakes",
                folder.path.display(),
                counted(loaded.domains(), "domain")
            ));
            Ok(true)
        }
        Err(error @ FolderError::Mistaken { .. }) => {
            complain(&error.to_string());
            Ok(false)
        }
        Err(error) => Err(error.to_string()),
    }
}

fn warn(warning: &impl std::fmt::Display) {
    complain(&format!("warning: {warning}"));
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
