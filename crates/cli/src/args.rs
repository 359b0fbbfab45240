//! The command line arguments. Doc comments of arguments are their help texts.

use std::{convert::Infallible, path::PathBuf};

use clap::{Args as Arguments, Parser, Subcommand, ValueEnum};
use tidegate_core::{bounds, notation::integer_advice};
use tidegate_simulate::{EntryMapping, LogFormat, Share, Sweep, WhatIf};

use crate::{print, version::version};

const ROOT_HELP: &str = "\
Examples:
  tidegate check rules.yaml && tidegate serve --config rules.yaml
  tidegate status
  tidegate block login 203.0.113.9 --for 1h --reason \"credential stuffing\"

`serve`, `check`, `simulate` and `version` need no running server. `health` needs its admin or metrics listener, and all other commands need its admin listener (`listen.admin`).

Exit codes:
  0  success
  1  negative result: a file has errors, a rule or block does not exist, or the server is not ready
  2  error: the arguments are invalid, or the command could not be executed";

const SERVE_HELP: &str = "\
Examples:
  tidegate serve --config rules.yaml
  TIDEGATE_LOG=debug tidegate serve --config rules.yaml

Signals:
  SIGTERM, SIGINT  finish the requests in progress, and exit
  SIGHUP           reload the rules file, certificates and GeoIP databases, and reopen log files
  SIGUSR2          start this program again, and let it take over without a gap";

const CHECK_HELP: &str = "\
Examples:
  tidegate check rules.yaml
  tidegate check rules.yaml --strict --format json
  tidegate check --envoy /etc/ratelimit/config

Exit codes: 0 if the file is valid, 1 if it has errors, 2 if it cannot be read.";

const SIMULATE_HELP: &str = "\
Examples:
  tidegate simulate rules.yaml --log /var/log/nginx/access.log /var/log/nginx/access.log.1.gz
  tidegate simulate rules.yaml --log access.json --entry customer=user.id --json
  tidegate simulate new.yaml --against rules.yaml --log access.log --fail-over 0.1%
  tidegate simulate rules.yaml --log access.log --what-if api.limit=200/min --suggest
  tidegate simulate rules.yaml --log access.log --sweep api.limit=50/min,100/min,200/min --report report.html
  kubectl logs deploy/web | tidegate simulate rules.yaml --log - --format '$remote_addr [$msec] \"$request\"'

These log formats are detected: combined, common and main (nginx, Apache), caddy, tidegate, traefik,
envoy, haproxy, JSON lines, and CSV with a header. Files may be compressed with gzip or zstd.

Exit codes: 0 if the logs were simulated, 2 if the rules or a log cannot be read, 3 if more
requests are denied than --fail-over allows, 130 after Ctrl-C.";

/// The help text about key arguments, which all commands that take a key share.
macro_rules! key_help {
    ($examples:literal) => {
        concat!(
            "Examples:\n",
            $examples,
            "\n\n`tidegate rules` shows the key of each rule. For a rule without a key, pass no \
             values. If a value begins with a dash, write `--` before the values, and the options before `--`: \
             `tidegate inspect api -- -1`."
        )
    };
}

const BLOCK_HELP: &str = key_help!(
    "  tidegate block login 203.0.113.9 --for 1h --reason \"credential stuffing\"
  tidegate block api acme /v1/export --for forever
  tidegate block --entry ip=203.0.113.0/24 --for 1h    a network, in all rules
  tidegate block --entry tenant=acme --rule api --for 1h    whatever the other parts of the key are
  tidegate block login 203.0.113.9 --for 1min --shorten"
);

const UNBLOCK_HELP: &str = key_help!(
    "  tidegate unblock login 203.0.113.9
  tidegate unblock --entry ip=203.0.113.0/24
  tidegate unblock OLD-NAME 203.0.113.9    lifts a block of a rule that no longer exists"
);

const OVERRIDE_HELP: &str = key_help!(
    "  tidegate override api acme --limit 200/min --for 2h --reason launch
  tidegate override api acme --limit 2x --until 2030-01-01T09:00:00Z
  tidegate override api acme --plan pro
  tidegate override api 'acme-*' --limit 10/s --limit 200/min    all keys that match the pattern
  tidegate override api acme --remove"
);

const INSPECT_HELP: &str = key_help!("  tidegate inspect login 203.0.113.9");

const TOP_HELP: &str = "\
Examples:
  tidegate top
  tidegate top login --by denied --over 1h
  tidegate top --watch
  tidegate top --over all    the busiest keys of every period, and the blocks with the time left

The number shown for a key is an estimate: the exact number is between AT LEAST and AT MOST. The totals are exact.";

const KEYS_HELP: &str = "\
Examples:
  tidegate keys login
  tidegate keys login -n 1000

A key is listed from its first charge until all its units are available again. With Redis, the command \
scans all keys of the Redis servers. The scan takes time on a large Redis, and can list a key twice.";

const DENIALS_HELP: &str = "\
Examples:
  tidegate denials
  tidegate denials --rule login --since 1h
  tidegate denials --rule api --key acme --key /v1/export

A server lists its denials since startup and, with Redis, the denials of the other servers. `denials.max_bytes` in the rules \
file limits the memory for denials; when this memory is full, the server discards the oldest denials.";

const EVENTS_HELP: &str = "\
Examples:
  tidegate events
  tidegate events -n 20 --follow

A server lists only its own events since startup, at most 1024. The section `events` of the rules file sets \
which events are detected, and to which files and webhooks they are sent.";

const EXPLAIN_HELP: &str = "\
Examples:
  tidegate explain path=/login method=POST ip=203.0.113.9
  tidegate explain --cost 5 path=/api/export customer=acme

Nothing is charged. The entries are normalised like the entries of /v1/check.";

const PREVIEW_HELP: &str = "\
Examples:
  tidegate preview new-rules.yaml

Nothing is applied. For each rule whose mode changes from `shadow` to `enforce`, the output shows how many \
requests the rule would have denied in the last hour.";

const CANDIDATE_HELP: &str = "\
Examples:
  tidegate candidate
  tidegate candidate -n 100
  tidegate candidate promote

The rules file names the candidate rules: `candidate: {rules: FILE}`. The server also evaluates them for \
every request, counts the differences, and never denies a request because of them. `promote` activates them until \
the next reload or restart.";

const RESET_HELP: &str = concat!(
    key_help!(
        "  tidegate reset login 203.0.113.9
  tidegate reset --throttle user:42"
    ),
    "\n\nWith Redis, the other servers may still deny requests of the key for up to \
     `store.denial_cache_ttl` (default 1s), because they cache denials."
);

const KEY_USAGE: &str = "[OPTIONS] <RULE> [VALUES]...";

/// The arguments of [`KeyOrEntries`] that name a key. An option that is only for `--entry` needs
/// `requires = "entries"`, and must also conflict with these arguments. If `name` is present, clap
/// skips the `requires`, because `entries` conflicts with `name`.
const KEY_ARGUMENTS: [&str; 2] = ["name", "values"];

/// A rate limiter that decides whether each request is allowed now and, if not, exactly when to
/// retry.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version = version(), arg_required_else_help = true, after_help = ROOT_HELP)]
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
    /// error
    #[command(after_help = CHECK_HELP)]
    Check(Check),
    /// Try a rules file on recorded traffic: read access logs, and report which requests the rules
    /// would have denied
    #[command(after_help = SIMULATE_HELP)]
    Simulate(Simulate),
    /// Show the status of the running server: version, readiness, store, rules and listeners
    Status {
        #[command(flatten)]
        admin: Admin,
    },
    /// Health check for containers: exit with 0 if the running server is ready, 1 if it is not, and
    /// 2 if it does not respond. No token is needed on the loopback interface or on the metrics
    /// listener
    Health {
        #[command(flatten)]
        admin: Admin,
    },
    /// List the active rules
    Rules {
        #[command(flatten)]
        admin: Admin,
    },
    /// Show what would change in the running server if FILE were its rules file
    #[command(after_help = PREVIEW_HELP)]
    Preview {
        /// A rules file
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        admin: Admin,
    },
    /// Reload the server's rules file and certificates
    Reload {
        #[command(flatten)]
        admin: Admin,
    },
    /// Deny every request of a key, or every request with certain entries, regardless of its limits
    #[command(after_help = BLOCK_HELP, override_usage = key_or_entries_usage("block"))]
    Block {
        #[command(flatten)]
        target: KeyOrEntries,
        #[command(flatten)]
        options: BlockOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// Lift the block on a key or on entries, even if the rule no longer exists
    #[command(after_help = UNBLOCK_HELP, override_usage = key_or_entries_usage("unblock"))]
    Unblock {
        #[command(flatten)]
        target: KeyOrEntries,
        #[command(flatten)]
        admin: Admin,
    },
    /// List the blocks
    Blocks {
        #[command(flatten)]
        options: BlocksOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// Set limits for a key, or for all keys that match a pattern, in place of the rule's limits
    #[command(after_help = OVERRIDE_HELP, override_usage = key_usage("override"))]
    Override {
        #[command(flatten)]
        key: RuleKey,
        #[command(flatten)]
        options: OverrideOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// List the overrides
    Overrides {
        #[command(flatten)]
        options: OverridesOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// Show how much of each limit a key of a rule has left, and whether the key is blocked
    #[command(after_help = INSPECT_HELP, override_usage = key_usage("inspect"))]
    Inspect {
        #[command(flatten)]
        key: RuleKey,
        #[command(flatten)]
        admin: Admin,
    },
    /// List the keys of a rule, and how much of each limit every key has left
    #[command(after_help = KEYS_HELP)]
    Keys {
        #[command(flatten)]
        options: KeysOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// List recent denials, newest first
    #[command(after_help = DENIALS_HELP)]
    Denials {
        #[command(flatten)]
        options: DenialsOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// List recent events: keys that are denied, surges, outages, and changes by operators
    #[command(after_help = EVENTS_HELP)]
    Events {
        #[command(flatten)]
        options: EventsOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// Show how a request would be decided, and which rules do not apply to it and why
    #[command(after_help = EXPLAIN_HELP)]
    Explain {
        #[command(flatten)]
        options: ExplainOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// Reset the counters of a key, but keep a block on the key
    #[command(after_help = RESET_HELP, override_usage = reset_usage())]
    Reset {
        #[command(flatten)]
        key: KeyOrThrottle,
        #[command(flatten)]
        admin: Admin,
    },
    /// List the keys with the most requests, denials or cost
    #[command(after_help = TOP_HELP)]
    Top {
        #[command(flatten)]
        options: TopOptions,
        #[command(flatten)]
        admin: Admin,
    },
    /// Show how the candidate rules would change the decisions, or activate them
    #[command(after_help = CANDIDATE_HELP)]
    Candidate {
        /// What to do with the candidate rules
        #[arg(value_enum, default_value_t)]
        action: CandidateAction,
        /// The number of keys in each list, 1 to 1000
        #[arg(short = 'n', default_value = "20", value_name = "N")]
        count: String,
        #[command(flatten)]
        admin: Admin,
    },
    /// Write the man pages and the shell completions of this program to a folder
    #[cfg(feature = "reference")]
    #[command(hide = true)]
    Reference {
        /// The folder
        folder: PathBuf,
    },
    /// Print the version of this program; `status` shows the version of the server
    Version,
}

/// The end and the reason of a block.
#[derive(Debug, clap::Args)]
pub(crate) struct BlockOptions {
    /// The duration, such as 10min, 1h or forever [default for a key: the rule's longest window, at
    /// least 1min]
    #[arg(long = "for", value_name = "TIME", conflicts_with = "until")]
    #[arg(allow_hyphen_values = true, value_parser = duration)]
    pub(crate) span: Option<String>,
    /// The end: a date such as 2030-01-01 (00:00 UTC), or a date and time such as
    /// 2030-01-01T09:00:00Z; only with --entry
    #[arg(long, value_name = "DATE", requires = "entries", conflicts_with_all = KEY_ARGUMENTS)]
    pub(crate) until: Option<String>,
    /// The reason, shown in the list of blocks
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Accept values that the listeners would normalise or reject, for services that send their
    /// entries with `raw`
    #[arg(long)]
    pub(crate) raw: bool,
    /// Let the new block end earlier than the current block. Without this option, the server
    /// refuses a shorter block. A longer block always replaces the current block
    #[arg(long)]
    pub(crate) shorten: bool,
    /// Accept a network with a prefix shorter than /8 (IPv4) or /16 (IPv6); only with --entry
    #[arg(long, requires = "entries", conflicts_with_all = KEY_ARGUMENTS)]
    pub(crate) wide: bool,
}

/// Which blocks to list.
#[derive(Debug, clap::Args)]
pub(crate) struct BlocksOptions {
    /// Only blocks that contain this string in a value or in the reason. For an address, also the
    /// blocks of networks that contain the address
    #[arg(long, value_name = "TEXT")]
    pub(crate) search: Option<String>,
}

/// The limits of an override, and its end.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("change").required(true))]
pub(crate) struct OverrideOptions {
    /// A limit such as 200/min, or a factor such as 2x; may be repeated for several limits
    #[arg(long = "limit", value_name = "LIMIT", group = "change")]
    #[arg(allow_hyphen_values = true, value_parser = limit)]
    pub(crate) limits: Vec<String>,
    /// The plan whose limits apply
    #[arg(long, value_name = "PLAN", group = "change")]
    pub(crate) plan: Option<String>,
    /// Remove the override, even if the rule no longer exists
    #[arg(long, group = "change", conflicts_with_all = ["span", "until", "reason", "raw"])]
    pub(crate) remove: bool,
    /// The duration, such as 2h or 7d [default: forever]
    #[arg(long = "for", value_name = "TIME", conflicts_with = "until")]
    #[arg(allow_hyphen_values = true, value_parser = duration)]
    pub(crate) span: Option<String>,
    /// The end: a date such as 2030-01-01 (00:00 UTC), or a date and time such as
    /// 2030-01-01T09:00:00Z
    #[arg(long, value_name = "DATE")]
    pub(crate) until: Option<String>,
    /// The reason, shown in the list of overrides
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Accept values that the listeners would normalise or reject, for services that send their
    /// entries with `raw`
    #[arg(long)]
    pub(crate) raw: bool,
}

/// Which overrides to list.
#[derive(Debug, clap::Args)]
pub(crate) struct OverridesOptions {
    /// Only the overrides of this rule
    #[arg(long, value_name = "RULE")]
    pub(crate) rule: Option<String>,
    /// Only overrides that contain this string in a key value, in the pattern or in the reason
    #[arg(long, value_name = "TEXT")]
    pub(crate) search: Option<String>,
    /// The maximum number of overrides, 1 to 1000
    #[arg(short = 'n', default_value = "100", value_name = "N")]
    pub(crate) count: String,
    /// The position to continue from, as printed at the end of an earlier list
    #[arg(long, value_name = "POSITION")]
    pub(crate) after: Option<String>,
}

/// Returns the usage line of a command that takes a key. The usage line that clap generates would
/// list every option with a value, even if that value comes from an environment variable.
fn key_usage(command: &str) -> String {
    format!("tidegate {command} {KEY_USAGE}")
}

fn key_or_entries_usage(command: &str) -> String {
    let entries = format!("tidegate {command} [OPTIONS] --entry <NAME=VALUE>");
    format!("{}\n       {entries}", key_usage(command))
}

fn reset_usage() -> String {
    let throttle = "tidegate reset [OPTIONS] --throttle <KEY>";
    format!("{}\n       {throttle}", key_usage("reset"))
}

/// The actions of `candidate`.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(crate) enum CandidateAction {
    /// Show how the candidate rules would change the decisions
    #[default]
    Show,
    /// Activate the candidate rules
    Promote,
}

/// The options of `top`.
#[derive(Debug, Arguments)]
pub(crate) struct TopOptions {
    /// The rule's name [default: all rules]
    pub(crate) rule: Option<String>,
    /// The number to rank keys by: requests, denied or cost
    #[arg(long, default_value = "requests", value_name = "WHAT")]
    pub(crate) by: String,
    /// The period: 5m, 15m, 1h or 1d; or `all` for these four periods and the blocks
    #[arg(long, default_value = "5m", value_name = "TIME")]
    pub(crate) over: String,
    /// The number of rows, 1 to 1000
    #[arg(short = 'n', long = "count", default_value = "20", value_name = "N")]
    pub(crate) count: String,
    /// Repeat the list every 2 seconds until interrupted. On a terminal, each list replaces the
    /// previous list
    #[arg(long)]
    pub(crate) watch: bool,
}

/// The options of `keys`.
#[derive(Debug, Arguments)]
pub(crate) struct KeysOptions {
    /// The rule's name
    pub(crate) rule: String,
    /// The maximum number of keys to list
    #[arg(short = 'n', default_value = "100", value_name = "N")]
    #[arg(allow_hyphen_values = true, value_parser = key_count)]
    pub(crate) count: usize,
    /// The position to continue from, as printed at the end of an earlier list
    #[arg(long, value_name = "POSITION")]
    pub(crate) after: Option<String>,
}

/// The options of `events`.
#[derive(Debug, clap::Args)]
pub(crate) struct EventsOptions {
    /// The number of events, 1 to 1024
    #[arg(short = 'n', default_value = "100", value_name = "N")]
    pub(crate) count: String,
    /// Print further events as they happen, until interrupted
    #[arg(long)]
    pub(crate) follow: bool,
}

/// The options of `denials`.
#[derive(Debug, Arguments)]
pub(crate) struct DenialsOptions {
    /// The rule's name [default: all rules, and limits sent with requests]
    #[arg(long)]
    pub(crate) rule: Option<String>,
    /// A value of the key; repeat the option for each value, in the order of the rules file
    #[arg(long = "key", value_name = "VALUE", allow_hyphen_values = true)]
    pub(crate) key: Vec<String>,
    /// The maximum age of a denial, such as 10min or 1h
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// The number of rows, 1 to 1000
    #[arg(short = 'n', default_value = "100", value_name = "N")]
    pub(crate) count: String,
}

/// The options of `explain`.
#[derive(Debug, Arguments)]
pub(crate) struct ExplainOptions {
    /// The entries of the request, as NAME=VALUE
    #[arg(required = true, value_name = "NAME=VALUE", value_parser = entry)]
    pub(crate) entries: Vec<(String, String)>,
    /// The cost of the request [default: 1]
    #[arg(long, value_name = "N", value_parser = cost)]
    pub(crate) cost: Option<u64>,
    /// Show only this rule
    #[arg(long, value_name = "NAME")]
    pub(crate) rule: Option<String>,
    /// Use the values unchanged, for services that send their entries with `raw`
    #[arg(long)]
    pub(crate) raw: bool,
}

/// Reads the limit of an override. The server checks the rest of it.
fn limit(text: &str) -> Result<String, String> {
    match text.starts_with('-') {
        false => Ok(text.to_owned()),
        true => Err(
            "expected a limit such as 200/min, or a factor such as 2x, neither of which is negative"
                .to_owned(),
        ),
    }
}

fn duration(text: &str) -> Result<String, String> {
    match text.starts_with('-') {
        false => Ok(text.to_owned()),
        true => Err("expected a positive duration such as 2h".to_owned()),
    }
}

fn cost(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| {
        let advice = integer_advice(text, &(1..=bounds::MAX_COUNT));
        format!("expected an integer without an exponent or a unit, such as 1000{advice}")
    })
}

fn key_count(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| {
        let advice = integer_advice(text, &(1..=bounds::MAX_COUNT));
        format!("expected a number of keys, such as 100{advice}")
    })
}

fn entry(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE, such as path=/login".to_owned()),
    }
}

/// A key of a rule.
#[derive(Debug, Arguments)]
pub(crate) struct RuleKey {
    /// The rule's name
    pub(crate) rule: String,
    /// The values of the rule's key entries, in the order of the rules file
    pub(crate) values: Vec<String>,
}

/// A key of a rule, or entries of requests.
#[derive(Debug, Arguments)]
pub(crate) struct KeyOrEntries {
    /// The rule's name
    #[arg(required_unless_present = "entries", value_name = "RULE")]
    pub(crate) name: Option<String>,
    /// The values of the rule's key entries, in the order of the rules file
    pub(crate) values: Vec<String>,
    /// An entry of the requests, as NAME=VALUE, instead of a key. The value can be a network, such
    /// as 203.0.113.0/24. If the option is repeated, a request must have all the entries
    #[arg(long = "entry", value_name = "NAME=VALUE", value_parser = entry, conflicts_with_all = KEY_ARGUMENTS)]
    pub(crate) entries: Vec<(String, String)>,
    /// With --entry, only requests to which this rule applies [default: all requests]
    #[arg(long, value_name = "RULE", requires = "entries", conflicts_with_all = KEY_ARGUMENTS)]
    pub(crate) rule: Option<String>,
}

/// A rule's key, or the key of a limit that was sent with a request.
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

/// The admin endpoint of a running server, and how to print its responses.
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
    /// Connect over TLS, and trust the CA certificates in this PEM file
    #[arg(long, env = "TIDEGATE_ADMIN_CA", value_name = "FILE")]
    pub(crate) admin_ca: Option<PathBuf>,
    /// The client certificate for the TLS connection, a PEM file
    #[arg(
        long,
        env = "TIDEGATE_ADMIN_CERT",
        value_name = "FILE",
        requires = "admin_ca",
        requires = "admin_key"
    )]
    pub(crate) admin_cert: Option<PathBuf>,
    /// The private key of the client certificate, a PEM file
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
    /// Returns the token; `None` if the token is empty, as in `TIDEGATE_ADMIN_TOKEN=`.
    pub(crate) fn token(&self) -> Option<&str> {
        self.token.as_deref().filter(|token| !token.is_empty())
    }
}

#[derive(Debug, Arguments)]
pub(crate) struct Check {
    /// The rules file
    #[arg(required_unless_present_any = ["envoy", "limitador"])]
    pub(crate) file: Option<PathBuf>,
    /// The file or folder with envoyproxy/ratelimit's configuration
    #[arg(long, value_name = "DIR")]
    pub(crate) envoy: Option<PathBuf>,
    /// Allow several files of the Envoy configuration to define the same domain
    #[arg(long, requires = "envoy")]
    pub(crate) merge_domains: bool,
    /// Limitador's limits file
    #[arg(long, value_name = "FILE")]
    pub(crate) limitador: Option<PathBuf>,
    /// Exit with 1 if there are warnings. Notes about files and variables that this machine lacks
    /// do not count as warnings
    #[arg(long)]
    pub(crate) strict: bool,
    /// Exit with 1 also if this machine lacks a file or environment variable that the server needs
    /// to start
    #[arg(long)]
    pub(crate) this_machine: bool,
    /// The output format of the findings
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT")]
    pub(crate) format: CheckFormat,
}

#[derive(Debug, Arguments)]
pub(crate) struct Simulate {
    /// The rules file
    #[arg(value_name = "RULES")]
    pub(crate) file: PathBuf,
    /// The access logs; `-` is standard input. Several logs are merged by time
    #[arg(long = "log", required = true, num_args = 1.., value_name = "FILE")]
    pub(crate) logs: Vec<PathBuf>,
    /// The format of the logs: the name of a known format, nginx's `log_format` string, or Apache's
    /// `LogFormat` string [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = LogFormat::parse)]
    pub(crate) format: Option<LogFormat>,
    /// Take an entry from another field of the log, such as customer=user.id; `time=FIELD` names
    /// the time field. Can be repeated
    #[arg(long = "entry", value_name = "ENTRY=FIELD", value_parser = EntryMapping::parse)]
    pub(crate) entries: Vec<EntryMapping>,
    /// Compare with another rules file, such as the active rules file, and report which requests
    /// are newly denied and which requests are no longer denied
    #[arg(long, value_name = "OTHER_RULES")]
    pub(crate) against: Option<PathBuf>,
    /// Replace the limits of a rule, such as api.limit=200/min or api.limit=10/s,200/min, and
    /// compare with the unchanged file. Can be repeated
    #[arg(long, value_name = "RULE.limit=LIMIT", conflicts_with = "against")]
    pub(crate) what_if: Vec<WhatIf>,
    /// Count the denials under several limits of a rule, such as api.limit=50/min,100/min or
    /// "api.limit=50..200/min step 50", in one pass over the logs; at most 32 limits
    #[arg(long, value_name = "RULE.limit=LIMITS")]
    pub(crate) sweep: Option<Sweep>,
    /// Suggest limits that deny at most this share of the keys of each rule; for token buckets,
    /// also the smallest burst for several rates
    #[arg(long, value_name = "SHARE", num_args = 0..=1, require_equals = true, default_missing_value = "1%")]
    pub(crate) suggest: Option<Share>,
    /// Show keyed hashes in place of the values of keys, as `privacy: {keys: hashed}` in the rules
    /// file does. The hash secret is the one in the rules file, if there is one, and otherwise
    /// random for each run
    #[arg(long)]
    pub(crate) hash_keys: bool,
    /// Exit with 3 if more than this share of the requests is denied. With --against and --what-if,
    /// only newly denied requests count
    #[arg(long, value_name = "SHARE")]
    pub(crate) fail_over: Option<Share>,
    /// Write the report, with charts, to this HTML file
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The output format of `check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckFormat {
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
    /// `check` takes the file as a positional argument, so users expect the same here. The argument
    /// is always rejected, with an error that recommends `--config`.
    #[arg(hide = true, value_parser = name_the_option)]
    pub(crate) file: Option<Infallible>,
    /// Read the settings from the environment variables of envoyproxy/ratelimit
    #[arg(long, conflicts_with = "config")]
    pub(crate) from_envoy_env: bool,
    /// What to log: error, warn, info, debug, or a filter such as tidegate=debug [default:
    /// info]
    #[arg(long, env = "TIDEGATE_LOG", value_name = "FILTER")]
    pub(crate) log: Option<String>,
    /// The format of the log: lines of text, or one JSON object per line [default: text]
    #[arg(
        long,
        env = "TIDEGATE_LOG_FORMAT",
        value_name = "FORMAT",
        value_enum,
        hide_possible_values = true
    )]
    pub(crate) log_format: Option<LogFormatName>,
}

/// The format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormatName {
    /// Lines of text.
    Text,
    /// One JSON object per line.
    Json,
}

fn name_the_option(file: &str) -> Result<Infallible, String> {
    let file = print::printable(file);
    Err(format!(
        "pass the rules file with --config: `tidegate serve --config {file}`"
    ))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, error::ErrorKind};

    use super::*;

    /// The name is set explicitly, because the package and the program have different names.
    #[test]
    fn the_program_is_named_tidegate() {
        assert_eq!(Args::command().get_name(), "tidegate");
    }

    #[test]
    fn a_negative_limit_is_refused_with_the_expected_form() {
        let parse = |limit| {
            let arguments = ["tidegate", "override", "api", "acme", "--limit", limit];
            Args::try_parse_from(arguments)
        };
        assert!(parse("2x").is_ok());
        for limit in ["-2x", "-5/min", "--for"] {
            let error = parse(limit).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ValueValidation, "{limit}");
            let error = error.to_string();
            assert!(error.contains("a factor such as 2x, neither"), "{error}");
        }
    }

    #[test]
    fn a_negative_duration_is_refused_with_the_expected_form() {
        for arguments in [
            &["tidegate", "override", "api", "acme", "--limit", "2x"][..],
            &["tidegate", "block", "api", "acme"],
        ] {
            let parse = |span| Args::try_parse_from([arguments, &["--for", span]].concat());
            assert!(parse("1h").is_ok());
            for span in ["-1h", "--reason"] {
                let error = parse(span).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ValueValidation, "{span}");
                let error = error.to_string();
                assert!(error.contains("--for <TIME>"), "{error}");
                assert!(
                    error.contains("expected a positive duration such as 2h"),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn an_override_without_a_change_names_the_options() {
        let parse = |options: &[&str]| {
            let arguments = [&["tidegate", "override", "api", "acme"], options].concat();
            Args::try_parse_from(arguments)
        };
        let error = parse(&[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::MissingRequiredArgument);
        let expected = "<--limit <LIMIT>|--plan <PLAN>|--remove>";
        assert!(error.to_string().contains(expected), "{error}");
        assert!(parse(&["--limit", "2/s", "--limit", "9/min"]).is_ok());
        for options in [
            &["--limit", "2x", "--plan", "pro"][..],
            &["--limit", "2x", "--remove"],
            &["--plan", "pro", "--remove"],
            &["--remove", "--reason", "x"],
        ] {
            let kind = parse(options).unwrap_err().kind();
            assert_eq!(kind, ErrorKind::ArgumentConflict, "{options:?}");
        }
    }

    #[test]
    fn a_wrong_number_of_keys_is_explained() {
        for text in ["x", "-5", "1.5"] {
            let arguments = ["tidegate", "keys", "api", "-n", text];
            let error = Args::try_parse_from(arguments).unwrap_err().to_string();
            let expected = format!("'{text}' for '-n <N>': expected a number of keys, such as 100");
            assert!(error.contains(&expected), "{error}");
        }
    }

    #[test]
    fn the_options_of_entries_are_refused_for_a_key() {
        let parse = |command: &str, target: &[&str], option: &[&str]| {
            let arguments = [&["tidegate", command], target, option].concat();
            Args::try_parse_from(arguments)
                .map_err(|error| error.kind())
                .err()
        };
        for (command, option) in [
            ("block", &["--rule", "api"][..]),
            ("block", &["--until", "2030-01-01T00:00:00Z"]),
            ("block", &["--wide"]),
            ("unblock", &["--rule", "api"]),
        ] {
            let conflict = Some(ErrorKind::ArgumentConflict);
            let missing = Some(ErrorKind::MissingRequiredArgument);
            for (target, expected) in [
                (&["--entry", "ip=203.0.113.9"][..], None),
                (&["login", "203.0.113.9"], conflict),
                (&["login"], conflict),
                (&[], missing),
            ] {
                let found = parse(command, target, option);
                assert_eq!(found, expected, "{command} {target:?} {option:?}");
            }
        }
    }
}
