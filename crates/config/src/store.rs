//! `store`: the store that keeps the counters.

use std::path::PathBuf;

use tidegate_core::{MemoryBounds, Span, WhenFull, notation};

use super::{
    RedisConfig, redis,
    report::Report,
    value::{Fields, Shape, Value, at_least_one},
};

/// The file to which the memory store is saved, and how often it is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The path of the file, relative to the server's working directory.
    pub path: PathBuf,
    /// The interval between two snapshots; default 30 s. A snapshot is also written at shutdown.
    pub every: Span,
}

/// The minimum interval between two snapshots.
const MIN_SNAPSHOT_INTERVAL: Span = Span::from_secs(1);

/// The default interval between two snapshots.
const DEFAULT_SNAPSHOT_INTERVAL: Span = Span::from_secs(30);

/// The units for sizes, with their number of bytes.
const UNITS: [(&str, u64); 8] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

/// The settings of the section `store`.
#[derive(Default)]
pub(super) struct StoreSettings {
    pub(super) memory: MemoryBounds,
    pub(super) snapshot: Option<Snapshot>,
    pub(super) redis: Option<RedisConfig>,
}

/// The keys of the section `store`. All keys except the first two are for the Redis store.
const FIELDS: &[&str] = &[
    "memory",
    "redis",
    "timeout",
    "on_failure",
    "fallback_share",
    "denial_cache_ttl",
    "connections",
    "prefix",
    "username",
    "password",
    "password_env",
    "tls",
];

pub(super) fn store(file: &Fields<'_>, report: &mut Report) -> StoreSettings {
    let Some(value) = file.get("store") else {
        return StoreSettings::default();
    };
    let what = "`memory`, or a map such as {redis: \"redis://127.0.0.1:6379\"}";
    if let Shape::Scalar | Shape::List = value.shape() {
        match value.text(report, what) {
            Some("redis") => value.wrong(
                report,
                "the address of Redis is missing; write {redis: \"redis://127.0.0.1:6379\"}",
            ),
            Some("memory") | None => {}
            Some(_) => value.expected(report, what),
        }
        return StoreSettings::default();
    }
    let Some(fields) = value.fields(report, what, FIELDS) else {
        return StoreSettings::default();
    };
    let (memory, snapshot) = fields
        .get("memory")
        .map_or_else(Default::default, |memory| bounds(memory, report));
    let redis = fields
        .get("redis")
        .and_then(|value| redis::redis(value, &fields, report));
    if fields.get("redis").is_none() {
        for name in &FIELDS[2..] {
            if let Some(value) = fields.get(name) {
                value.wrong(report, "applies only to the Redis store; remove it");
            }
        }
    } else if let Some(snapshot) = fields.get("memory").filter(|_| snapshot.is_some()) {
        let message = "snapshots are not supported with the Redis store, which keeps the counts itself; remove `snapshot`";
        snapshot.wrong(report, message);
    }
    StoreSettings {
        memory,
        snapshot,
        redis,
    }
}

fn bounds(value: &Value<'_>, report: &mut Report) -> (MemoryBounds, Option<Snapshot>) {
    let mut bounds = MemoryBounds::default();
    let known = &["max_keys", "max_bytes", "when_full", "snapshot"];
    let Some(fields) = value.fields(report, "a map such as {max_keys: 1000000}", known) else {
        return (bounds, None);
    };
    if let Some(max_keys) = fields.get("max_keys") {
        let number = max_keys.small_number(report);
        bounds.max_keys = at_least_one(number, max_keys, report).unwrap_or(bounds.max_keys);
    }
    if let Some(max_bytes) = fields.get("max_bytes") {
        let number = size(max_bytes, report);
        bounds.max_bytes = at_least_one(number, max_bytes, report).unwrap_or(bounds.max_bytes);
    }
    if let Some(when_full) = fields.get("when_full") {
        let choices = [
            ("evict", WhenFull::Evict),
            ("deny", WhenFull::Deny),
            ("allow", WhenFull::Allow),
        ];
        bounds.when_full = when_full.choice(report, &choices).unwrap_or_default();
    }
    let snapshot = fields
        .get("snapshot")
        .and_then(|value| snapshot(value, report));
    (bounds, snapshot)
}

/// Reads a size such as `1GiB`, or a number of bytes.
pub(super) fn size(value: &Value<'_>, report: &mut Report) -> Option<usize> {
    if value.looks_like_number() {
        return value.small_number(report);
    }
    let what = "a size such as 512MiB or 1GiB";
    let text = value.text(report, what)?;
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = UNITS
        .iter()
        .find(|(name, _)| *name == unit.trim())
        .map(|(_, bytes)| *bytes);
    let bytes = number
        .parse::<u64>()
        .ok()
        .zip(unit)
        .and_then(|(number, unit)| number.checked_mul(unit));
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    if bytes.is_none() {
        value.expected(report, what);
    }
    bytes
}

/// Reads the snapshot settings: the path of the file, or a map that contains the path.
fn snapshot(value: &Value<'_>, report: &mut Report) -> Option<Snapshot> {
    let what = "a path, or a map such as {path: counters.snapshot, every: 30s}";
    if let Some(path) = value.scalar() {
        return path_of(value, path, report).map(|path| Snapshot {
            path,
            every: DEFAULT_SNAPSHOT_INTERVAL,
        });
    }
    let fields = value.fields(report, what, &["path", "every"])?;
    let every = match fields.get("every") {
        Some(every) => interval(every, report),
        None => Some(DEFAULT_SNAPSHOT_INTERVAL),
    };
    let Some(path) = fields.get("path") else {
        fields.wrong(report, "path", "is missing; name the snapshot file");
        return None;
    };
    let text = path.text(report, "the path of a file")?;
    let path = path_of(path, text, report)?;
    every.map(|every| Snapshot { path, every })
}

pub(super) fn path_of(value: &Value<'_>, text: &str, report: &mut Report) -> Option<PathBuf> {
    if text.is_empty() || text.contains('\0') {
        value.expected(report, "the path of a file");
        return None;
    }
    Some(text.into())
}

fn interval(value: &Value<'_>, report: &mut Report) -> Option<Span> {
    let every = value.parsed(report, "a duration such as 30s", notation::span)?;
    if every < MIN_SNAPSHOT_INTERVAL {
        value.wrong(
            report,
            format!("must be at least {MIN_SNAPSHOT_INTERVAL}, got {every}"),
        );
        return None;
    }
    Some(every)
}
