//! `serve`: runs the server.

use std::{env, process::ExitCode};

use tidegate_config::{AdminToken, Config, KeyPrivacy, Password, RedisConfig, WebhookConfig};
use tidegate_envoy::{self as envoy, Variables};
use tidegate_server::serve::{self as server, Program, Secrets, Takeover};

#[cfg(feature = "telemetry")]
use crate::telemetry::Telemetry;
use crate::{
    args::{LogFormatName, Serve},
    credential, log,
    output::eprint_message,
};

/// The environment variable that tells this process to take over from the process that has started
/// it.
const UPGRADE: &str = "TIDEGATE_UPGRADE";

pub(crate) fn serve(args: &Serve) -> Result<ExitCode, String> {
    let Some(_) = env::var_os(UPGRADE) else {
        return run(args, None);
    };
    let takeover = Takeover::from_stdin().map_err(|error| error.to_string())?;
    let reporter = takeover.reporter();
    // The old process logs the problem too, and continues to serve.
    run(args, Some(takeover)).inspect_err(|problem| reporter.fail(problem))
}

/// Serves until the server stops. With a `takeover`, first takes over from the old process of an
/// upgrade.
fn run(args: &Serve, takeover: Option<Takeover>) -> Result<ExitCode, String> {
    let StartSettings {
        config,
        log,
        log_format,
        ignored,
    } = read_settings(args)?;
    #[cfg(feature = "telemetry")]
    let mut telemetry = Telemetry::start()?;
    log::start(
        &log,
        log_format,
        #[cfg(feature = "telemetry")]
        &telemetry,
    )?;
    #[cfg(feature = "telemetry")]
    telemetry.log_warnings();
    for line in ignored {
        eprint_message(&line);
    }
    let secrets = secrets(&config)?;
    let cannot_start = |error: std::io::Error| format!("cannot start: {error}");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(cannot_start)?;
    let signals = runtime
        .block_on(server::Signals::install())
        .map_err(cannot_start)?;
    let (rules, quotas) = (config.rules.len(), config.quotas.len());
    let running = server::start(config, args.config.as_deref(), secrets, takeover)
        .map_err(|error| error.to_string())?
        .with_program(own_program());
    #[cfg(feature = "telemetry")]
    telemetry.observe(&running);
    log_active_rules(args, rules, quotas);
    let stopped = runtime.block_on(running.until_stopped(signals));
    #[cfg(feature = "telemetry")]
    telemetry.stop();
    stopped.map_err(|error| error.to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns this program as it was called; an upgrade starts the same program.
fn own_program() -> Program {
    let mut arguments = env::args_os();
    Program {
        path: arguments.next().unwrap_or_else(|| "tidegate".into()),
        arguments: arguments.collect(),
        variable: UPGRADE,
    }
}

/// Logs the number of active rules and quotas. Envoy's rate limit service logs its own
/// configuration.
fn log_active_rules(args: &Serve, rules: usize, quotas: usize) {
    match &args.config {
        Some(path) => tracing::info!(rules, quotas, file = %path.display(), "rules are active"),
        None if args.from_envoy_env => {}
        None => tracing::info!(
            "no rules file: only limits sent with requests apply; pass a file with --config"
        ),
    }
}

/// The server configuration, the log filter and the log format.
struct StartSettings {
    config: Config,
    log: String,
    log_format: LogFormatName,
    /// The settings that have no effect, each with the reason.
    ignored: Vec<String>,
}

fn read_settings(args: &Serve) -> Result<StartSettings, String> {
    let log = args.log.clone();
    if args.from_envoy_env {
        let variables: Variables = env::vars().collect();
        let read = envoy::from_environment(&variables).map_err(|problems| problems.join("\n"))?;
        let log = log
            .or_else(|| read.log.map(str::to_owned))
            .unwrap_or_else(default_log);
        let json_log = read.json_log.unwrap_or_default();
        let of_envoy = if json_log {
            LogFormatName::Json
        } else {
            LogFormatName::Text
        };
        return Ok(StartSettings {
            config: read.config,
            log,
            log_format: args.log_format.unwrap_or(of_envoy),
            ignored: read.ignored,
        });
    }
    let config = match &args.config {
        Some(path) => Config::read(path).map_err(|error| error.to_string())?,
        None => Config::default(),
    };
    Ok(StartSettings {
        config,
        log: log.unwrap_or_else(default_log),
        log_format: args.log_format.unwrap_or(LogFormatName::Text),
        ignored: Vec::new(),
    })
}

fn default_log() -> String {
    "info".to_owned()
}

/// Reads the secrets from the environment variables that `config` names. The error lists all
/// missing secrets, one per line.
fn secrets(config: &Config) -> Result<Secrets, String> {
    let mut missing = Vec::new();
    let mut found = |secret: Result<Option<String>, String>| {
        secret.unwrap_or_else(|problem| {
            missing.push(problem);
            None
        })
    };
    let secrets = Secrets {
        token: found(admin_token("admin.token_env", &config.admin_token)),
        operator_tokens: config
            .operator_tokens
            .iter()
            .enumerate()
            .filter_map(|(index, operator)| {
                let field = format!("admin.tokens[{index}].token_env");
                found(admin_token(&field, &operator.token))
            })
            .collect(),
        webhook_secrets: webhooks(config)
            .iter()
            .enumerate()
            .filter_map(|(index, webhook)| {
                let field = format!("events.webhooks[{index}].secret_env");
                found(named_secret(&field, &webhook.secret, "the webhook secret"))
            })
            .collect(),
        password: found(redis_password(config.redis.as_ref())),
        http_token: found(named_secret(
            "listen.http.token_env",
            &config.listeners.http.credential,
            "the listener's token",
        )),
        resp_password: found(named_secret(
            "listen.resp.password_env",
            &config.listeners.resp.credential,
            "the listener's password",
        )),
        key_secret: found(key_secret(&config.key_privacy)),
        reservation_secrets: found(named_secret(
            "reservations.secret_env",
            &config.reservations.credential,
            "the reservation secret",
        )),
    };
    if missing.is_empty() {
        Ok(secrets)
    } else {
        Err(missing.join("\n"))
    }
}

/// Returns a message for each secret that `config` names and that is missing. If no secret is
/// missing, returns a message for each invalid secret.
pub(crate) fn secret_problems(config: &Config) -> Vec<String> {
    match secrets(config) {
        Ok(secrets) => {
            let errors = server::secret_errors(config, &secrets);
            errors.iter().map(ToString::to_string).collect()
        }
        Err(missing) => missing.lines().map(str::to_owned).collect(),
    }
}

fn webhooks(config: &Config) -> &[WebhookConfig] {
    let events = config.events.0.as_ref();
    events.map_or(&[], |events| &events.webhooks)
}

fn admin_token(field: &str, token: &AdminToken) -> Result<Option<String>, String> {
    match token {
        AdminToken::None => Ok(None),
        AdminToken::Literal(token) => Ok(Some(token.clone())),
        AdminToken::Env(name) => credential::read(field, name, "the admin token").map(Some),
    }
}

/// Returns the secret that `privacy` configures for hashing keys; `None` if no secret is
/// configured.
pub(crate) fn key_secret(privacy: &KeyPrivacy) -> Result<Option<String>, String> {
    match privacy {
        KeyPrivacy::Plain => Ok(None),
        KeyPrivacy::Hashed { secret } => {
            named_secret("privacy.secret_env", secret, "the hash secret")
        }
    }
}

fn named_secret(field: &str, credential: &Password, what: &str) -> Result<Option<String>, String> {
    match credential {
        Password::None => Ok(None),
        Password::Literal(secret) => Ok(Some(secret.clone())),
        Password::Env(name) => credential::read(field, name, what).map(Some),
    }
}

/// Returns the Redis password from the environment; `None` if the configuration does not name a
/// variable.
fn redis_password(redis: Option<&RedisConfig>) -> Result<Option<String>, String> {
    match redis.map(|redis| &redis.password) {
        Some(Password::Env(name)) => {
            credential::read("store.password_env", name, "the Redis password").map(Some)
        }
        _ => Ok(None),
    }
}
