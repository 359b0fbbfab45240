//! Names that are label values in metrics.

use crate::{report::Report, value::Value};

/// The maximum length of a name, in bytes.
const MAX_NAME_BYTES: usize = 64;

/// Reads a name that is used as a label value in metrics.
pub(super) fn name(value: &Value<'_>, report: &mut Report) -> Option<Box<str>> {
    let what = "a name of 1 to 64 letters, digits, `-`, `_` and `.`";
    let name = value.text(report, what)?;
    let is_sound = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if !is_sound {
        value.expected(report, what);
    }
    is_sound.then(|| name.into())
}
