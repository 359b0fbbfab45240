//! Patterns with `*`. A `*` matches any number of characters of any kind, including none and `/`. A
//! pattern can contain several `*`.

/// A wildcard pattern. A string matches if it contains the pattern's literal pieces in order and
/// without overlap. Between the pieces, the string may contain other characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wildcard {
    prefix: Box<str>,
    middle: Box<[Box<str>]>,
    suffix: Box<str>,
}

impl Wildcard {
    /// Parses a pattern. Returns `None` if `text` does not contain `*`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (prefix, rest) = text.split_once('*')?;
        let (middle, suffix) = rest.rsplit_once('*').unwrap_or(("", rest));
        let middle = middle.split('*').filter(|piece| !piece.is_empty());
        Some(Self {
            prefix: prefix.into(),
            middle: middle.map(Box::from).collect(),
            suffix: suffix.into(),
        })
    }

    pub(super) fn matches(&self, text: &str) -> bool {
        let between = text
            .strip_prefix(&*self.prefix)
            .and_then(|rest| rest.strip_suffix(&*self.suffix));
        let Some(mut rest) = between else {
            return false;
        };
        // Greedy search is sufficient, because the first match of a piece leaves the longest
        // possible rest for the later pieces.
        for piece in &self.middle {
            match rest.find(&**piece) {
                Some(at) => rest = &rest[at + piece.len()..],
                None => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pieces_match_in_order_without_overlap() {
        for (pattern, matching, others) in [
            (
                "path_/api/*",
                &["path_/api/", "path_/api/v1/x"][..],
                &["path_/ap", "path_/API/x"][..],
            ),
            (
                "bar*b",
                &["barb", "bar12b", "barbb"],
                &["bab", "bara", "xbarb", "bar"],
            ),
            (
                "foo*bar*baz",
                &["foobarbaz", "foo1bar2baz", "foobarbarbaz"],
                &["foobaz", "foobarba", "foobabaz"],
            ),
            ("*", &["", "a"], &[]),
            ("a**b", &["ab", "axb"], &["a"]),
            ("*aa*a", &["aaa", "xaaxa"], &["aa"]),
        ] {
            let wildcard = Wildcard::parse(pattern).unwrap();
            for text in matching {
                assert!(wildcard.matches(text), "{pattern} {text}");
            }
            for text in others {
                assert!(!wildcard.matches(text), "{pattern} {text}");
            }
        }
        assert_eq!(Wildcard::parse("plain"), None);
    }

    /// Matches with the simplest algorithm, which is slow but obviously correct.
    fn naive(pattern: &[char], text: &[char]) -> bool {
        match pattern {
            [] => text.is_empty(),
            ['*', rest @ ..] => (0..=text.len()).any(|skipped| naive(rest, &text[skipped..])),
            [first, rest @ ..] => text.first() == Some(first) && naive(rest, &text[1..]),
        }
    }

    proptest! {
        #[test]
        fn matching_agrees_with_the_naive_algorithm(pattern in "[ab*]{0,8}", text in "[ab]{0,10}") {
            let characters = |text: &str| text.chars().collect::<Vec<_>>();
            if let Some(wildcard) = Wildcard::parse(&pattern) {
                let expected = naive(&characters(&pattern), &characters(&text));
                prop_assert_eq!(wildcard.matches(&text), expected, "{} {}", pattern, text);
            }
        }
    }
}
