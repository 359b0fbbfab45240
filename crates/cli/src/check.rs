//! `check`: what `serve` would make of the files, without serving.

use std::{path::Path, process::ExitCode};

use tidegate_server::{
    envoy::{DomainFiles, Folder, FolderError, Loaded},
    reload::{self, LoadError},
    serve::{forfeits, hindrances},
};

use crate::{NO, TROUBLE, answer, args::Check, complain, serve::secrets};

/// What came of one thing that was checked; the worst of several is what came of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Sound,
    Mistaken,
    Unreadable,
}

/// Reads what is named as `serve` would: yes if it could serve and limit something, no with every mistake if not, trouble
/// with what hinders it from reading.
pub(crate) fn check(args: &Check) -> ExitCode {
    let of_file = args.file.as_deref().map(check_file);
    let of_envoy = args.envoy.as_ref().map(|path| {
        let merging = if args.merge_domains {
            DomainFiles::Merged
        } else {
            DomainFiles::One
        };
        let path = path.clone();
        let folder = Folder { path, merging };
        said_of(folder.load(), &folder.path, "")
    });
    match of_file.max(of_envoy) {
        None | Some(Found::Sound) => ExitCode::SUCCESS,
        Some(Found::Mistaken) => ExitCode::from(NO),
        Some(Found::Unreadable) => ExitCode::from(TROUBLE),
    }
}

/// A rules file, and the rules for Envoy to which it leads. The files of certificates and the like that it names need not be on the machine
/// on which it is checked.
fn check_file(file: &Path) -> Found {
    let config = match reload::load(file) {
        Ok(config) => config,
        Err(error) => {
            complain(&error.to_string());
            if file.is_dir() {
                complain("a folder of envoyproxy/ratelimit's files is checked with --envoy");
            }
            return match error {
                LoadError::Mistaken { .. } => Found::Mistaken,
                _ => Found::Unreadable,
            };
        }
    };
    config.warnings.iter().for_each(warn);
    let secrets = secrets(&config).err();
    let hindrances = hindrances(&config);
    let hindrances = hindrances.iter().map(ToString::to_string).chain(secrets);
    hindrances.for_each(|what| warn(&format!("on this machine it would not start: {what}")));
    let forfeits = forfeits(&config).into_iter();
    forfeits.for_each(|what| warn(&format!("on this machine {what}")));
    let rules = counted(config.rules.len(), "rule");
    let sound = format!("{}: {rules}, no mistakes", file.display());
    let Some(envoy) = config.envoy else {
        answer(&sound);
        return Found::Sound;
    };
    let loaded = envoy.folder.load();
    // A file that leads nowhere has no reason to be praised.
    if let Err(error @ FolderError::Unreadable { .. }) = loaded {
        complain(&format!("{}: envoy.config: {error}", file.display()));
        return Found::Unreadable;
    }
    answer(&sound);
    said_of(loaded, &envoy.folder.path, "envoy.config: ")
}

/// Says what is wrong with the rules for Envoy at `path`, each complaint after `whose`.
fn said_of(loaded: Result<Loaded, FolderError>, path: &Path, whose: &str) -> Found {
    let path = path.display();
    match loaded {
        Ok(loaded) if loaded.domains() == 0 => {
            complain(&format!(
                "{whose}{path} has no file with a domain: nothing that Envoy asks about would be limited"
            ));
            Found::Mistaken
        }
        Ok(loaded) => {
            loaded.warnings.iter().for_each(warn);
            let domains = counted(loaded.domains(), "domain");
            answer(&format!("{path}: {domains}, no mistakes"));
            Found::Sound
        }
        Err(error) => {
            complain(&format!("{whose}{error}"));
            match error {
                FolderError::Mistaken { .. } => Found::Mistaken,
                _ => Found::Unreadable,
            }
        }
    }
}

fn warn(warning: &impl std::fmt::Display) {
    complain(&format!("warning: {warning}"));
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
