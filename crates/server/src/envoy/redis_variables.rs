//! The store, from the Redis variables of envoyproxy/ratelimit.
//!
//! They are written as the `store` section of a rules file and read as one, so that what a server, a user or a
//! certificate is stands in one place.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};

use super::variables::Reader;
use crate::config::{Config, RedisConfig};

/// The variables that are honoured here.
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

/// Where the counts are shared; `None` keeps them in this process.
pub(super) fn redis(reader: &mut Reader<'_>) -> Option<RedisConfig> {
    let servers = servers(reader)?;
    if reader.flag("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION") {
        let problem = "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION: a certificate of anybody's protects nothing; \
                       give REDIS_TLS_CACERT the authority that signed the server's";
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
    // JSON is YAML too.
    match Config::parse(&json!({ "store": store }).to_string()) {
        Ok(config) => config.redis,
        Err(mistakes) => {
            let problems = mistakes
                .iter()
                .map(|mistake| format!("REDIS_URL and what goes with it: {}", mistake.message));
            reader.problems.extend(problems);
            None
        }
    }
}

/// The servers as `store.redis` has them.
fn servers(reader: &mut Reader<'_>) -> Option<Value> {
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

/// A server as a URL: an address on the network, the path of a socket, or a URL already.
fn url(scheme: &str, login: &str, address: &str) -> String {
    if address.contains("://") {
        address.to_owned()
    } else if address.starts_with('/') {
        format!("redis+unix://{address}")
    } else {
        format!("{scheme}://{login}{address}")
    }
}

/// `password` or `user:password` as it stands in a URL.
fn login(auth: &str) -> String {
    let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let (user, password) = auth.split_once(':').unwrap_or(("", auth));
    format!("{}:{}@", encoded(user), encoded(password))
}
