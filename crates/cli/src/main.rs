//! `tidegate`: serving, checking, simulating, and operating a running server.

mod admin_address;
mod args;
mod check;
mod conflict;
mod credential;
mod log;
mod operate;
mod output;
mod print;
#[cfg(feature = "reference")]
mod reference;
mod serve;
mod simulate;
#[cfg(feature = "telemetry")]
mod telemetry;
mod tls;
mod unreachable;
mod version;

use std::{ffi::OsString, path::Path, process::ExitCode};

use clap::{CommandFactory as _, Parser};

use crate::{
    args::{Args, Command},
    output::{TROUBLE, eprint_message, is_output_lost, print_result},
};

/// The allocator used in release packages, which are linked with musl.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let parsed = Args::try_parse_from(arguments(std::env::args_os().collect()));
    let args = parsed.unwrap_or_else(|error| conflict::with_advice(error).exit());
    let done = match args.command {
        Command::Serve(serve) => serve::serve(&serve),
        Command::Check(check) => Ok(check::check(&check)),
        Command::Simulate(args) => simulate::run(&args),
        Command::Status { admin } => operate::status(&admin),
        Command::Health { admin } => operate::health(&admin),
        Command::Rules { admin } => operate::rules(&admin),
        Command::Preview { file, admin } => operate::preview(&admin, &file),
        Command::Reload { admin } => operate::reload(&admin),
        Command::Block {
            target,
            options,
            admin,
        } => operate::block(&admin, target, options),
        Command::Unblock { target, admin } => operate::unblock(&admin, target),
        Command::Blocks { options, admin } => operate::blocks(&admin, &options),
        Command::Override {
            key,
            options,
            admin,
        } => operate::set_override(&admin, &key, options),
        Command::Overrides { options, admin } => operate::overrides(&admin, &options),
        Command::Inspect { key, admin } => operate::inspect(&admin, &key),
        Command::Keys { options, admin } => operate::keys(&admin, &options),
        Command::Events { options, admin } => operate::events(&admin, &options),
        Command::Denials { options, admin } => operate::denials(&admin, &options),
        Command::Explain { options, admin } => operate::explain(&admin, &options),
        Command::Reset { key, admin } => operate::reset(&admin, &key),
        Command::Candidate {
            action,
            count,
            admin,
        } => operate::candidate(&admin, action, &count),
        Command::Top { options, admin } => operate::top(&admin, &options),
        #[cfg(feature = "reference")]
        Command::Reference { folder } => reference::write(&folder),
        Command::Version => {
            print_result(&Args::command().render_version());
            Ok(ExitCode::SUCCESS)
        }
    };
    let code = done.unwrap_or_else(|problem| {
        eprint_message(&problem);
        ExitCode::from(TROUBLE)
    });
    if is_output_lost() {
        return ExitCode::from(TROUBLE);
    }
    code
}

/// Returns the arguments to parse. If this program is called as `ratelimit`, it replaces
/// envoyproxy/ratelimit, so the returned arguments run the server with settings from the
/// environment variables. `ratelimit --version` prints the version.
fn arguments(given: Vec<OsString>) -> Vec<OsString> {
    let name = given.first().map(|program| Path::new(program).file_name());
    if name.flatten() != Some("ratelimit".as_ref()) {
        return given;
    }
    if given
        .get(1)
        .is_some_and(|first| first == "--version" || first == "-V")
    {
        return given;
    }
    let program = ["tidegate", "serve", "--from-envoy-env"].map(OsString::from);
    program
        .into_iter()
        .chain(given.into_iter().skip(1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_ratelimit_serves_with_the_environment() {
        let of = |given: &[&str]| {
            let read = arguments(given.iter().map(OsString::from).collect());
            let read = read.into_iter().map(|one| one.into_string().unwrap());
            read.collect::<Vec<_>>().join(" ")
        };
        let serve = "tidegate serve --from-envoy-env";
        assert_eq!(of(&["/bin/ratelimit"]), serve);
        let with_log = of(&["ratelimit", "--log", "debug"]);
        assert_eq!(with_log, format!("{serve} --log debug"));
        let version = of(&["/bin/ratelimit", "--version"]);
        assert_eq!(version, "/bin/ratelimit --version");
        let other = of(&["/ratelimit/tidegate", "status"]);
        assert_eq!(other, "/ratelimit/tidegate status");
        assert_eq!(of(&[]), "");
    }
}
