//! `top`: the settings for top talkers.

use tidegate_core::top::TopBounds;

use super::{
    report::Report,
    store,
    value::{Fields, Shape},
};

/// The maximum number of keys in the top talkers, and the maximum memory that they use; `None` if
/// top talkers are disabled (`top: off`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Top(pub Option<TopBounds>);

impl Default for Top {
    fn default() -> Self {
        Self(Some(TopBounds::default()))
    }
}

/// The minimum of `keys`.
const MIN_KEYS: usize = 10;
/// The maximum of `keys`.
const MAX_KEYS: usize = 100_000;

/// The minimum of `max_bytes`.
const MIN_BYTES: usize = 4 << 20;
/// The maximum of `max_bytes`.
const MAX_BYTES: usize = 16 << 30;

/// Reads the maximum number of keys in the top talkers, and the maximum memory that they use.
/// Returns `None` if top talkers are disabled.
pub(super) fn top(file: &Fields<'_>, report: &mut Report) -> Top {
    let mut bounds = TopBounds::default();
    let Some(value) = file.get("top") else {
        return Top(Some(bounds));
    };
    let what = "off, or a map such as {keys: 1000, max_bytes: 32MiB}";
    if let Shape::Scalar = value.shape() {
        match value.scalar() {
            Some("off") => return Top(None),
            _ => value.expected(report, what),
        }
        return Top(Some(bounds));
    }
    let Some(fields) = value.fields(report, what, &["keys", "max_bytes"]) else {
        return Top(Some(bounds));
    };
    if let Some(value) = fields.get("keys")
        && let Some(keys) = value.small_number::<usize>(report)
    {
        if !(MIN_KEYS..=MAX_KEYS).contains(&keys) {
            value.wrong(report, format!("must be {MIN_KEYS} to {MAX_KEYS}"));
        }
        bounds.keys = keys;
    }
    if let Some(value) = fields.get("max_bytes")
        && let Some(bytes) = store::size(value, report)
    {
        if !(MIN_BYTES..=MAX_BYTES).contains(&bytes) {
            value.wrong(report, "must be 4MiB to 16GiB");
        }
        bounds.max_bytes = bytes;
    }
    Top(Some(bounds))
}
