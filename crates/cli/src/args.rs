//! What can be typed.

use std::path::PathBuf;

use clap::{Args as Arguments, Parser, Subcommand};

/// A rate limiter: it decides, for every request, whether it may pass now, and if not, exactly when.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer on every door until told to stop
    Serve(Serve),
    /// Read a rules file, or the configuration of Envoy's rate limit service, and report every mistake in it
    Check(Check),
    /// Deny everything from a key, whatever its limits say
    Block {
        #[command(flatten)]
        key: Key,
        /// For how long: 10min, 1h, or forever; as long as the rule's longest window if not given
        #[arg(long = "for", value_name = "TIME")]
        span: Option<String>,
        /// Why, for whoever lists the blocks
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
        #[command(flatten)]
        door: Door,
    },
    /// Lift the block on a key
    Unblock {
        #[command(flatten)]
        key: Key,
        #[command(flatten)]
        door: Door,
    },
    /// List the blocks that stand
    Blocks {
        #[command(flatten)]
        door: Door,
    },
    /// Show how a key stands with every limit of a rule
    Inspect {
        #[command(flatten)]
        key: Key,
        #[command(flatten)]
        door: Door,
    },
    /// Forget what a key has spent
    Reset {
        #[command(flatten)]
        key: Key,
        #[command(flatten)]
        door: Door,
    },
}

/// A key of a rule.
#[derive(Debug, Arguments)]
pub(crate) struct Key {
    /// The rule's name
    pub(crate) rule: String,
    /// The values of the rule's key entries, in the order of the rules file
    pub(crate) values: Vec<String>,
}

/// The admin door of a running server.
#[derive(Debug, Arguments)]
pub(crate) struct Door {
    /// Where the admin door of the running server is
    #[arg(
        long,
        env = "TIDEGATE_ADMIN",
        default_value = "127.0.0.1:9090",
        value_name = "ADDRESS"
    )]
    pub(crate) admin: String,
    /// Its token, if it asks for one
    #[arg(
        long,
        env = "TIDEGATE_ADMIN_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN"
    )]
    pub(crate) token: Option<String>,
}

#[derive(Debug, Arguments)]
pub(crate) struct Check {
    /// The rules file
    #[arg(required_unless_present = "envoy")]
    pub(crate) file: Option<PathBuf>,
    /// The file or folder with envoyproxy/ratelimit's configuration
    #[arg(long, value_name = "DIR")]
    pub(crate) envoy: Option<PathBuf>,
    /// Let a domain be in several files of it
    #[arg(long, requires = "envoy")]
    pub(crate) merge_domains: bool,
}

#[derive(Debug, Arguments)]
pub(crate) struct Serve {
    /// The rules file; without one, only limits that come with the request are answered
    #[arg(long, short, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Take the settings from the environment variables of envoyproxy/ratelimit
    #[arg(long, conflicts_with = "config")]
    pub(crate) from_envoy_env: bool,
    /// What to log: error, warn, info, debug, or a filter such as tidegate_server=debug [default: info]
    #[arg(long, env = "TIDEGATE_LOG", value_name = "FILTER")]
    pub(crate) log: Option<String>,
}
