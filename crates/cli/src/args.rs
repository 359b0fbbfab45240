//! The command line arguments. Doc comments of arguments are their help texts.

use std::{convert::Infallible, path::PathBuf};

use clap::{Args as Arguments, Parser, Subcommand, ValueEnum};

use crate::print;

const ROOT_HELP: &str = "\
Examples:
  tidegate check rules.yaml && tidegate serve --config rules.yaml
  tidegate status
  tidegate block login 203.0.113.9 --for 1h --reason \"credential stuffing\"

All commands but `serve`, `check` and `version` need the admin listener of a running server (`listen.admin`).

Exit codes:
  0  success, or the answer is yes
  1  the answer is no: mistakes in a file, no such rule, no such block
  2  error: the command could not be executed or understood";

const SERVE_HELP: &str = "\
Examples:
  tidegate serve --config rules.yaml
  TIDEGATE_LOG=debug tidegate serve --config rules.yaml";

const CHECK_HELP: &str = "\
Examples:
  tidegate check rules.yaml
  tidegate check rules.yaml --strict --format json
  tidegate check --envoy /etc/ratelimit/config

Exit codes: 0 if the file can be used, 1 if it has mistakes, 2 if it cannot be read.";

/// Explains the arguments of all commands with a key.
macro_rules! key_help {
    ($examples:literal) => {
        concat!(
            "Examples:\n",
            $examples,
            "\n\n`tidegate rules` shows the key of each rule. A rule without a key takes no values. Options go \
             before `--` if a value begins with a dash: `tidegate inspect api -- -1`."
        )
    };
}

const BLOCK_HELP: &str = key_help!(
    "  tidegate block login 203.0.113.9 --for 1h --reason \"credential stuffing\"
  tidegate block api acme /v1/export --for forever
  tidegate block login 203.0.113.9 --for 1min --shorten"
);

const UNBLOCK_HELP: &str = key_help!(
    "  tidegate unblock login 203.0.113.9
  tidegate unblock OLD-NAME 203.0.113.9    the block of a rule that no longer exists"
);

const INSPECT_HELP: &str = key_help!("  tidegate inspect login 203.0.113.9");

const RESET_HELP: &str = key_help!(
    "  tidegate reset login 203.0.113.9
  tidegate reset --throttle user:42"
);

const KEY_USAGE: &str = "[OPTIONS] <RULE> [VALUES]...";

/// A rate limiter: decides for every request whether it may pass now and, if not, exactly when.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, arg_required_else_help = true, after_help = ROOT_HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the server until SIGTERM or SIGINT
    #[command(after_help = SERVE_HELP)]
    Serve(Serve),
    /// Validate a rules file, or the configuration of Envoy's rate limit service, and report every
    /// mistake
    #[command(after_help = CHECK_HELP)]
    Check(Check),
    /// Show the status of the running server: version, readiness, store, rules and listeners
    Status {
        #[command(flatten)]
        admin: Admin,
    },
    /// List the active rules
    Rules {
        #[command(flatten)]
        admin: Admin,
    },
    /// Reload the server's rules file and certificates
    Reload {
        #[command(flatten)]
        admin: Admin,
    },
    /// Deny every request of a key, regardless of its limits
    #[command(after_help = BLOCK_HELP, override_usage = key_usage("block"))]
    Block {
        #[command(flatten)]
        key: Key,
        /// The duration, such as 10min, 1h or forever [default: the rule's longest window, at least 1min]
        #[arg(long = "for", value_name = "TIME")]
        span: Option<String>,
        /// The reason, shown in the list of blocks
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
        /// Accept values in a form that the listeners never count, for services that send their entries
        /// with `raw`
        #[arg(long)]
        raw: bool,
        /// Let the block end earlier than the block that the key already has; without this, such a
        /// block is refused. A block that lasts longer always replaces the earlier one
        #[arg(long)]
        shorten: bool,
        #[command(flatten)]
        admin: Admin,
    },
    /// Lift the block on a key, also of a rule that no longer exists
    #[command(after_help = UNBLOCK_HELP, override_usage = key_usage("unblock"))]
    Unblock {
        #[command(flatten)]
        key: Key,
        #[command(flatten)]
        admin: Admin,
    },
    /// List the blocks
    Blocks {
        #[command(flatten)]
        admin: Admin,
    },
    /// Show what remains of each limit of a rule for a key, and its block
    #[command(after_help = INSPECT_HELP, override_usage = key_usage("inspect"))]
    Inspect {
        #[command(flatten)]
        key: Key,
        #[command(flatten)]
        admin: Admin,
    },
    /// Reset the counters of a key; a block on it stays
    #[command(after_help = RESET_HELP, override_usage = reset_usage())]
    Reset {
        #[command(flatten)]
        key: KeyOrThrottle,
        #[command(flatten)]
        admin: Admin,
    },
    /// Print the version of this program; `status` shows that of the server
    Version,
}

/// Returns the usage of a command with a key. The generated one would show every option that has a
/// value, even if the value is from an environment variable.
fn key_usage(command: &str) -> String {
    format!("tidegate {command} {KEY_USAGE}")
}

fn reset_usage() -> String {
    let throttle = "tidegate reset [OPTIONS] --throttle <KEY>";
    format!("{}\n       {throttle}", key_usage("reset"))
}

/// A key of a rule.
#[derive(Debug, Arguments)]
pub(crate) struct Key {
    /// The rule's name
    pub(crate) rule: String,
    /// The values of the rule's key entries, in the order of the rules file
    pub(crate) values: Vec<String>,
}

/// A key of a rule, or of a limit that came with a request.
#[derive(Debug, Arguments)]
pub(crate) struct KeyOrThrottle {
    /// The rule's name
    #[arg(required_unless_present = "throttle")]
    pub(crate) rule: Option<String>,
    /// The values of the rule's key entries, in the order of the rules file
    pub(crate) values: Vec<String>,
    /// The key of a limit sent with a request (CL.THROTTLE, THROTTLE, /v1/throttle), instead of a
    /// rule's key
    #[arg(long, value_name = "KEY", conflicts_with_all = ["rule", "values"])]
    pub(crate) throttle: Option<String>,
}

/// The admin endpoint of a running server, and how to print its answers.
#[derive(Debug, Arguments)]
pub(crate) struct Admin {
    /// The address of the running server's admin endpoint: PORT (of 127.0.0.1), HOST (port 8082),
    /// HOST:PORT or a URL
    #[arg(
        long = "admin",
        env = "TIDEGATE_ADMIN",
        default_value = "127.0.0.1:8082",
        value_name = "ADDRESS"
    )]
    pub(crate) address: String,
    /// Connect over TLS, and trust the authorities in this PEM file
    #[arg(long, env = "TIDEGATE_ADMIN_CA", value_name = "FILE")]
    pub(crate) admin_ca: Option<PathBuf>,
    /// The client certificate for that connection, a PEM file
    #[arg(
        long,
        env = "TIDEGATE_ADMIN_CERT",
        value_name = "FILE",
        requires = "admin_ca",
        requires = "admin_key"
    )]
    pub(crate) admin_cert: Option<PathBuf>,
    /// The key of that certificate, a PEM file
    #[arg(
        long,
        env = "TIDEGATE_ADMIN_KEY",
        value_name = "FILE",
        requires = "admin_cert"
    )]
    pub(crate) admin_key: Option<PathBuf>,
    /// The admin token, if the server has one
    #[arg(
        long,
        env = "TIDEGATE_ADMIN_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN"
    )]
    pub(crate) token: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl Admin {
    /// Returns the token. An empty one, as in `TIDEGATE_ADMIN_TOKEN=`, is none.
    pub(crate) fn token(&self) -> Option<&str> {
        self.token.as_deref().filter(|token| !token.is_empty())
    }
}

#[derive(Debug, Arguments)]
pub(crate) struct Check {
    /// The rules file
    #[arg(required_unless_present = "envoy")]
    pub(crate) file: Option<PathBuf>,
    /// The file or folder with envoyproxy/ratelimit's configuration
    #[arg(long, value_name = "DIR")]
    pub(crate) envoy: Option<PathBuf>,
    /// Allow several of these files to define the same domain
    #[arg(long, requires = "envoy")]
    pub(crate) merge_domains: bool,
    /// Exit with 1 on warnings, as on mistakes; notes about files and variables that this machine
    /// lacks do not count
    #[arg(long)]
    pub(crate) strict: bool,
    /// Exit with 1 also if this machine lacks a file or variable without which the server would not
    /// start
    #[arg(long)]
    pub(crate) this_machine: bool,
    /// The output format of the findings
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT")]
    pub(crate) format: Format,
}

/// The output format of `check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Lines on standard error
    Text,
    /// A list of objects on standard output
    Json,
}

#[derive(Debug, Arguments)]
pub(crate) struct Serve {
    /// The rules file; without one, only limits sent with requests apply
    #[arg(long, short, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// `check` takes the file without an option, so users expect the same here.
    #[arg(hide = true, value_parser = name_the_option)]
    pub(crate) file: Option<Infallible>,
    /// Read the settings from the environment variables of envoyproxy/ratelimit
    #[arg(long, conflicts_with = "config")]
    pub(crate) from_envoy_env: bool,
    /// What to log: error, warn, info, debug, or a filter such as tidegate=debug [default:
    /// info]
    #[arg(long, env = "TIDEGATE_LOG", value_name = "FILTER")]
    pub(crate) log: Option<String>,
}

fn name_the_option(file: &str) -> Result<Infallible, String> {
    let file = print::printable(file);
    Err(format!(
        "pass the rules file with --config: `tidegate serve --config {file}`"
    ))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    /// The package has another name than the program.
    #[test]
    fn the_program_is_named_tidegate() {
        assert_eq!(Args::command().get_name(), "tidegate");
    }
}
