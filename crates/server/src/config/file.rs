//! The file as a whole: every key but `rules`.

use tidegate_core::{AlgorithmName, MemoryBounds, Span, WhenFull};

use super::{
    AdminToken, Config, Headers, LegacyHeaders, Listen, MAX_FILE_BYTES, Mistake, Snapshot, limits,
    node::{self, Value},
    read::{Mistakes, Place},
    rules,
};

const FIELDS: [&str; 7] = [
    "listen", "store", "defaults", "headers", "admin", "allow", "rules",
];

pub(super) fn parse(text: &str) -> Result<Config, Vec<Mistake>> {
    if text.len() > MAX_FILE_BYTES {
        let message = format!(
            "{} bytes is over the maximum of {MAX_FILE_BYTES}",
            text.len()
        );
        return Err(vec![Mistake {
            path: String::new(),
            line: None,
            message,
        }]);
    }
    let tree = node::parse(text).map_err(|mistake| vec![mistake])?;
    let (root, mut mistakes) = (Place::root(&tree), Mistakes::default());
    root.expect_keys(&FIELDS, &mut mistakes);
    let mut config = Config::default();
    config.listen = listen(&root, &mut mistakes, &mut config.warnings);
    (config.memory, config.snapshot) = store(&root, &mut mistakes);
    config.headers = headers(&root, &mut mistakes);
    config.admin_token = admin(&root, &mut mistakes);
    let algorithm = default_algorithm(&root, &mut mistakes);
    config.rules = rules::rule_set(&root, algorithm, &mut mistakes);
    if mistakes.0.is_empty() {
        return Ok(config);
    }
    mistakes.0.sort_by_key(|mistake| mistake.line);
    Err(mistakes.0)
}

fn listen(root: &Place<'_>, mistakes: &mut Mistakes, warnings: &mut Vec<Mistake>) -> Listen {
    let mut listen = Listen::default();
    let Some(place) = root.written("listen") else {
        return listen;
    };
    place.expect_keys(&["http", "grpc", "resp", "admin"], mistakes);
    let mut read = |name, default| match place.written(name) {
        Some(field) => field.address(mistakes).unwrap_or(default),
        None => default,
    };
    listen.http = read("http", listen.http);
    listen.resp = read("resp", listen.resp);
    listen.admin = read("admin", listen.admin);
    if read("grpc", None).is_some()
        && let Some(grpc) = place.written("grpc")
    {
        let message = "the gRPC door is not in this version; nothing listens there".to_owned();
        warnings.push(Mistake {
            path: grpc.path,
            line: Some(grpc.node.line),
            message,
        });
    }
    listen
}

fn store(root: &Place<'_>, mistakes: &mut Mistakes) -> (MemoryBounds, Option<Snapshot>) {
    let nothing = (MemoryBounds::default(), None);
    let Some(place) = root.written("store") else {
        return nothing;
    };
    if let Value::Scalar { .. } = place.node.value {
        place.choice(&[("memory", ())], mistakes);
        return nothing;
    }
    if let Some(redis) = place.field("redis") {
        mistakes.at(
            &redis,
            "the Redis store is not in this version; use `store: memory`",
        );
        return nothing;
    }
    place.expect_keys(&["memory", "redis"], mistakes);
    place
        .written("memory")
        .map_or(nothing, |memory| memory_store(&memory, mistakes))
}

fn memory_store(place: &Place<'_>, mistakes: &mut Mistakes) -> (MemoryBounds, Option<Snapshot>) {
    place.expect_keys(
        &["max_keys", "max_bytes", "when_full", "snapshot"],
        mistakes,
    );
    let mut bounds = MemoryBounds::default();
    if let Some(keys) = place
        .written("max_keys")
        .and_then(|field| field.number(mistakes))
    {
        bounds.max_keys = usize::try_from(keys).unwrap_or(usize::MAX);
        if keys == 0 {
            mistakes.in_field(place, "max_keys", "must be at least 1");
        }
    }
    if let Some(bytes) = place
        .written("max_bytes")
        .and_then(|field| field.bytes(mistakes))
    {
        bounds.max_bytes = bytes;
    }
    let words = [
        ("evict", WhenFull::Evict),
        ("deny", WhenFull::Deny),
        ("allow", WhenFull::Allow),
    ];
    if let Some(when_full) = place
        .written("when_full")
        .and_then(|field| field.choice(&words, mistakes))
    {
        bounds.when_full = when_full;
    }
    (
        bounds,
        place
            .written("snapshot")
            .and_then(|snapshot| self::snapshot(&snapshot, mistakes)),
    )
}

fn snapshot(place: &Place<'_>, mistakes: &mut Mistakes) -> Option<Snapshot> {
    const EVERY: Span = Span::from_secs(30);
    if let Value::Scalar { text, .. } = &place.node.value {
        return Some(Snapshot {
            path: text.into(),
            every: EVERY,
        });
    }
    place.expect_keys(&["path", "every"], mistakes);
    let every = match place.written("every") {
        Some(every) => every.span(mistakes)?,
        None => EVERY,
    };
    let Some(path) = place.written("path") else {
        mistakes.in_field(
            place,
            "path",
            "is missing: the file in which counters are kept",
        );
        return None;
    };
    Some(Snapshot {
        path: path.text(mistakes, "a file's path")?.into(),
        every,
    })
}

fn headers(root: &Place<'_>, mistakes: &mut Mistakes) -> Headers {
    let mut headers = Headers::default();
    let Some(place) = root.written("headers") else {
        return headers;
    };
    place.expect_keys(&["ratelimit", "legacy"], mistakes);
    if let Some(ratelimit) = place
        .written("ratelimit")
        .and_then(|field| field.truth(mistakes))
    {
        headers.ratelimit = ratelimit;
    }
    let words = [
        ("off", LegacyHeaders::Off),
        ("false", LegacyHeaders::Off),
        ("delta", LegacyHeaders::Delta),
        ("epoch", LegacyHeaders::Epoch),
    ];
    if let Some(legacy) = place
        .written("legacy")
        .and_then(|field| field.choice(&words, mistakes))
    {
        headers.legacy = legacy;
    }
    headers
}

fn admin(root: &Place<'_>, mistakes: &mut Mistakes) -> AdminToken {
    let Some(place) = root.written("admin") else {
        return AdminToken::None;
    };
    place.expect_keys(&["token", "token_env"], mistakes);
    let mut text = |name: &str| {
        let text = place.written(name)?.text(mistakes, "a text")?;
        if text.is_empty() {
            mistakes.in_field(&place, name, "must not be empty");
        }
        Some(text.to_owned())
    };
    match (text("token"), text("token_env")) {
        (Some(_), Some(_)) => {
            mistakes.in_field(
                &place,
                "token",
                "stands beside `token_env`; keep one of the two",
            );
            AdminToken::None
        }
        (Some(token), None) => AdminToken::Literal(token),
        (None, Some(name)) => AdminToken::Env(name),
        (None, None) => AdminToken::None,
    }
}

fn default_algorithm(root: &Place<'_>, mistakes: &mut Mistakes) -> AlgorithmName {
    let Some(place) = root.written("defaults") else {
        return AlgorithmName::TokenBucket;
    };
    place.expect_keys(&["algorithm"], mistakes);
    let algorithm = place
        .written("algorithm")
        .and_then(|field| limits::algorithm(&field, mistakes));
    algorithm.unwrap_or(AlgorithmName::TokenBucket)
}
