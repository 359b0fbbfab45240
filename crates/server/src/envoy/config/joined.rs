//! A warning where a file may rely on how envoyproxy/ratelimit joins names.
//!
//! A rule is found by its key and value joined with `_`, so that the key `user_id` also answers for the entry
//! `user` = `id`. Where another rule of the same level has the key `user`, only its author can know which one was meant.

use std::collections::HashSet;

use crate::config::{
    report::{Report, shown},
    value::Value,
};

/// Warns of every descriptor in `named`, which come with their keys and their joined names, that answers for an entry
/// of another one's key.
pub(super) fn warn(named: &[(&str, String, Value<'_>)], report: &mut Report) {
    let keys: HashSet<&str> = named.iter().map(|(key, _, _)| *key).collect();
    for (key, name, item) in named {
        let shorter = key
            .match_indices('_')
            .map(|(at, _)| (&key[..at], &name[at + 1..]));
        for (other, value) in shorter.filter(|(other, _)| keys.contains(other)) {
            let message = format!(
                "relies on joined names: this also applies to the entry `{}` = `{}`, before the rule with the key `{}` does; \
                 rename one of the two keys if that is not meant",
                shown(other),
                shown(value),
                shown(other)
            );
            item.warn(report, message);
        }
    }
}
