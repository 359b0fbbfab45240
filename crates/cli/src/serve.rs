//! `serve` and `check`.

use std::{io::IsTerminal, path::Path, process::ExitCode};

use tidegate_server::{
    config::{AdminToken, Config},
    reload::{self, LoadError},
    serve as server,
};
use tracing_subscriber::EnvFilter;

use crate::{NO, answer, args::Serve, complain};

pub(crate) fn serve(args: &Serve) -> Result<ExitCode, String> {
    log_to_stderr(&args.log)?;
    let config = match &args.config {
        Some(path) => reload::load(path).map_err(|error| error.to_string())?,
        None => Config::default(),
    };
    let token = admin_token(&config.admin_token)?;
    let cannot_start = |error: std::io::Error| format!("cannot start: {error}");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(cannot_start)?;
    let signals = runtime
        .block_on(server::Signals::hear())
        .map_err(cannot_start)?;
    let running =
        server::start(config, args.config.as_deref(), token).map_err(|error| error.to_string())?;
    runtime
        .block_on(running.until_stopped(signals))
        .map_err(|error| format!("stopped, but: {error}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Reads the file as `serve` would: yes if it could serve, no with every mistake if not.
///
/// # Errors
///
/// What hinders it from reading the file.
pub(crate) fn check(file: &Path) -> Result<ExitCode, String> {
    match reload::load(file) {
        Ok(config) => {
            config
                .warnings
                .iter()
                .for_each(|warning| complain(&format!("warning: {warning}")));
            let rules = config.rules.len();
            answer(&format!(
                "{}: {rules} rule{}, no mistakes",
                file.display(),
                if rules == 1 { "" } else { "s" }
            ));
            Ok(ExitCode::SUCCESS)
        }
        Err(error @ LoadError::Mistaken { .. }) => {
            complain(&error.to_string());
            Ok(ExitCode::from(NO))
        }
        Err(error) => Err(error.to_string()),
    }
}

fn log_to_stderr(filter: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| format!("--log: {error}; use error, warn, info or debug, or a filter such as tidegate_server=debug"))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the command line reads the environment"
)]
fn admin_token(token: &AdminToken) -> Result<Option<String>, String> {
    match token {
        AdminToken::None => Ok(None),
        AdminToken::Literal(token) => Ok(Some(token.clone())),
        AdminToken::Env(name) => match std::env::var(name) {
            Ok(token) if !token.is_empty() => Ok(Some(token)),
            _ => Err(format!(
                "admin.token_env: the environment variable {name} is not set; set it to the admin token"
            )),
        },
    }
}
