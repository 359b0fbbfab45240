//! Reads the Redis settings from the environment variables of envoyproxy/ratelimit.
//!
//! The variables are converted to the `store` section of a rules file, which is then parsed.
//! Therefore, only one module validates servers, logins and certificates.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};
use tidegate_config::{Config, RedisConfig};

use super::variables::VariableReader;

/// The supported environment variables.
pub(super) const HONOURED: &[&str] = &[
    "BACKEND_TYPE",
    "REDIS_URL",
    "REDIS_TYPE",
    "REDIS_SOCKET_TYPE",
    "REDIS_AUTH",
    "REDIS_SENTINEL_AUTH",
    "REDIS_TLS",
    "REDIS_TLS_CLIENT_CERT",
    "REDIS_TLS_CLIENT_KEY",
    "REDIS_TLS_CACERT",
    "CACHE_KEY_PREFIX",
];

/// Reads the Redis settings; `None` if the counts are kept in the memory of this process.
pub(super) fn redis(reader: &mut VariableReader<'_>) -> Option<RedisConfig> {
    let servers = servers(reader)?;
    if reader.flag("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION") {
        let problem = "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION: host name verification cannot be disabled; set \
            REDIS_TLS_CACERT to the CA that signed the server's certificate";
        reader.problems.push(problem.into());
    }
    let mut store = Map::new();
    store.insert("redis".into(), servers);
    if let Some(auth) = reader.text("REDIS_AUTH") {
        let (user, password) = auth
            .split_once(':')
            .map_or((None, auth), |(user, password)| (Some(user), password));
        store.extend(user.map(|user| ("username".to_owned(), json!(user))));
        store.insert("password".into(), json!(password));
    }
    let files = [
        ("ca", "REDIS_TLS_CACERT"),
        ("cert", "REDIS_TLS_CLIENT_CERT"),
        ("key", "REDIS_TLS_CLIENT_KEY"),
    ];
    let files = files
        .into_iter()
        .filter_map(|(key, name)| Some((key.to_owned(), json!(reader.text(name)?))));
    let files: Map<String, Value> = files.collect();
    if !files.is_empty() {
        store.insert("tls".into(), Value::Object(files));
    }
    store.extend(
        reader
            .text("CACHE_KEY_PREFIX")
            .map(|prefix| ("prefix".to_owned(), json!(prefix))),
    );
    // The JSON document can be parsed as YAML, because JSON is valid YAML.
    match Config::parse(&json!({ "store": store }).to_string()) {
        Ok(config) => config.redis,
        Err(mistakes) => {
            let problems = mistakes
                .iter()
                .map(|mistake| format!("REDIS_URL and related variables: {}", mistake.message));
            reader.problems.extend(problems);
            None
        }
    }
}

/// Returns the Redis servers in the form of `store.redis`.
fn servers(reader: &mut VariableReader<'_>) -> Option<Value> {
    let urls = reader.text("REDIS_URL")?;
    let scheme = if reader.flag("REDIS_TLS") {
        "rediss"
    } else {
        "redis"
    };
    let kind = reader.text("REDIS_TYPE").unwrap_or("single").to_lowercase();
    let mut parts = urls.split(',').map(str::trim);
    match kind.as_str() {
        "single" => Some(json!(url(scheme, "", urls))),
        "cluster" => {
            Some(json!({"cluster": parts.map(|part| url(scheme, "", part)).collect::<Vec<_>>()}))
        }
        "sentinel" => {
            let primary = parts.next().unwrap_or_default();
            let login = reader
                .text("REDIS_SENTINEL_AUTH")
                .map(login)
                .unwrap_or_default();
            let sentinels: Vec<String> = parts.map(|part| url(scheme, &login, part)).collect();
            Some(json!({"sentinel": sentinels, "primary": primary}))
        }
        _ => {
            let problem = format!(
                "REDIS_TYPE: expected one of SINGLE, SENTINEL, CLUSTER, got \"{}\"",
                kind.escape_debug()
            );
            reader.problems.push(problem);
            None
        }
    }
}

/// Returns the URL of a server. `address` is a network address, the path of a Unix socket, or a
/// URL.
fn url(scheme: &str, login: &str, address: &str) -> String {
    if address.contains("://") {
        address.to_owned()
    } else if address.starts_with('/') {
        format!("redis+unix://{address}")
    } else {
        format!("{scheme}://{login}{address}")
    }
}

/// Returns the login `auth` in URL encoding. The login is `password` or `user:password`.
fn login(auth: &str) -> String {
    let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let (user, password) = auth.split_once(':').unwrap_or(("", auth));
    format!("{}:{}@", encoded(user), encoded(password))
}
