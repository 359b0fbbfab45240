//! Warns about files whose meaning may depend on how envoyproxy/ratelimit joins keys and values.
//!
//! A request entry finds its rule by the entry's key and value, joined with `_`. A rule with the
//! key `user_id` therefore also applies to the entry `user` = `id`. If another rule at the same
//! level has the key `user`, the file is ambiguous, and only its author can resolve the ambiguity.

use std::collections::HashSet;

use tidegate_config::{report::Report, value::Value};
use tidegate_net::input::shown;

/// Warns about every descriptor in `named` that also applies to entries whose key is another
/// descriptor's key. Each element of `named` consists of the key, the joined name and the value in
/// the file.
pub(super) fn warn(named: &[(&str, String, Value<'_>)], report: &mut Report) {
    let keys: HashSet<&str> = named.iter().map(|(key, _, _)| *key).collect();
    for (key, name, item) in named {
        let shorter = key
            .match_indices('_')
            .map(|(at, _)| (&key[..at], &name[at + 1..]));
        for (other, value) in shorter.filter(|(other, _)| keys.contains(other)) {
            let message = format!(
                "keys and values are joined with `_`, so this rule also applies to the entry `{}` = `{}`, and takes \
                 precedence over the rule with the key `{}`; rename one of the two keys if this is not intended",
                shown(other),
                shown(value),
                shown(other)
            );
            item.warn(report, message);
        }
    }
}
