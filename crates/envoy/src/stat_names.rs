//! Descriptor paths in metrics. The paths have the same form as in envoyproxy/ratelimit, so that
//! existing dashboards keep working.

use super::{
    Descriptor,
    rules::{DescriptorRule, Detail, RuleNode},
};

/// Returns the path of a rule, which is its keys joined with dots. A key is followed by its value
/// if the rule specifies the value or exposes it in metrics.
pub(super) fn rule_path(
    rule: &DescriptorRule,
    nodes: &[&RuleNode],
    descriptor: &Descriptor,
) -> String {
    if rule.detail == Detail::Full {
        return full_path(descriptor, nodes);
    }
    let levels = descriptor
        .entries
        .iter()
        .zip(nodes)
        .map(|((key, value), node)| {
            let written = node.value.as_deref();
            let shown = if node.value_to_metric && !node.share_threshold {
                Some(value.as_str())
            } else {
                written
            };
            shown.map_or_else(|| key.clone(), |value| format!("{key}_{value}"))
        });
    join_levels(levels)
}

/// Returns the path with all values from the request. If all values at a level share one counter,
/// the path contains the level's pattern instead of the value.
pub(super) fn full_path(descriptor: &Descriptor, nodes: &[&RuleNode]) -> String {
    let levels = descriptor
        .entries
        .iter()
        .enumerate()
        .map(|(at, (key, value))| {
            let counted = nodes
                .get(at)
                .map_or(value.as_str(), |node| node.counted(value));
            format!("{key}_{counted}")
        });
    join_levels(levels)
}

/// Joins levels to a path. Like envoyproxy/ratelimit, replaces characters that have a meaning in
/// metric names with `_`. The replaced characters are `:`, `|`, and the dots in an IPv4 address,
/// which would otherwise create three additional levels.
fn join_levels(levels: impl Iterator<Item = String>) -> String {
    let path = levels.collect::<Vec<_>>().join(".");
    let mut written = String::with_capacity(path.len());
    let mut rest = path.as_str();
    while let Some(next) = rest.chars().next() {
        let address = address(rest.as_bytes());
        let (piece, remainder) = rest.split_at(address.unwrap_or_else(|| next.len_utf8()));
        match next {
            _ if address.is_some() => written.push_str(&piece.replace('.', "_")),
            ':' | '|' => written.push('_'),
            _ => written.push_str(piece),
        }
        rest = remainder;
    }
    written
}

/// Returns the length of the IPv4 address at the start of `bytes`, if there is one.
/// envoyproxy/ratelimit uses the same definition: an address is four numbers of one to three
/// digits.
fn address(bytes: &[u8]) -> Option<usize> {
    let mut len = 0;
    for number in 0..4 {
        if number > 0 {
            (bytes.get(len) == Some(&b'.')).then(|| len += 1)?;
        }
        let digits = bytes[len..].iter().take(3);
        let digits = digits.take_while(|byte| byte.is_ascii_digit()).count();
        (digits > 0).then(|| len += digits)?;
    }
    Some(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_characters_are_written_as_in_envoyproxy_ratelimit() {
        for (level, expected) in [
            ("remote_address_203.0.113.9", "remote_address_203_0_113_9"),
            ("masked_10.0.0.0/8", "masked_10_0_0_0/8"),
            ("ip_2001:db8::1", "ip_2001_db8__1"),
            ("plan_gold.v1", "plan_gold.v1"),
            ("a|b", "a_b"),
            ("version_1.2.3", "version_1.2.3"),
            ("1234.5.6.7", "1234_5_6_7"),
            ("1.2.3.4.5", "1_2_3_4.5"),
            ("1.2..4", "1.2..4"),
            ("stra\u{df}e_1", "stra\u{df}e_1"),
            ("", ""),
        ] {
            assert_eq!(join_levels([level.to_owned()].into_iter()), expected);
        }
        let levels = ["a_1.2.3.4", "b"].map(str::to_owned);
        assert_eq!(join_levels(levels.into_iter()), "a_1_2_3_4.b");
    }
}
