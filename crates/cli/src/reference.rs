//! The program's man pages and shell completions, which packages install.

use std::{fs, path::Path, process::ExitCode};

use clap::CommandFactory as _;
use clap_complete::{Shell, generate_to};

use crate::args::Args;

/// The shells for which completions are generated.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

/// Writes the man pages to the subfolder `man` of `folder`, and the completions to the subfolder
/// `completions`.
pub(crate) fn write(folder: &Path) -> Result<ExitCode, String> {
    let cannot_write =
        |error: std::io::Error| format!("cannot write to {}: {error}", folder.display());
    let (man, completions) = (folder.join("man"), folder.join("completions"));
    for folder in [&man, &completions] {
        fs::create_dir_all(folder).map_err(cannot_write)?;
    }
    clap_mangen::generate_to(Args::command(), &man).map_err(cannot_write)?;
    for shell in SHELLS {
        generate_to(shell, &mut Args::command(), "tidegate", &completions).map_err(cannot_write)?;
    }
    Ok(ExitCode::SUCCESS)
}
