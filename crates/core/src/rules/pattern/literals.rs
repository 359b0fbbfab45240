//! Literals of a regular expression: every matching value contains at least one of these strings.
//! The pattern index finds the expression by these strings.

use regex_syntax::hir::{
    Hir, HirKind,
    literal::{ExtractKind, Extractor, Seq},
};

/// The maximum number of literals under which an expression is indexed.
const MAX_ALTERNATIVES: usize = 64;

/// The maximum length of an extracted literal.
const MAX_LITERAL_BYTES: usize = 64;

/// The maximum number of parts of a concatenation that are searched for a literal.
const MAX_STARTS: usize = 32;

/// Required literals. For each matching value, the variant's condition is true for at least one
/// literal in the list.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::rules) enum Literals {
    /// The value equals one of these strings.
    Values(Box<[Box<str>]>),
    /// The value begins with one of these strings.
    Prefixes(Box<[Box<[u8]>]>),
    /// The value ends with one of these strings.
    Suffixes(Box<[Box<[u8]>]>),
    /// The value contains one of these strings.
    Parts(Box<[Box<[u8]>]>),
}

/// Returns the required literals of all values that match `hir` as a whole, with one element per
/// kind. The list is empty if no literals are known.
pub(in crate::rules) fn of(hir: &Hir) -> Vec<Literals> {
    let mut literals = Vec::new();
    let prefixes = extract(hir, ExtractKind::Prefix);
    if let Some(values) = whole_values(hir, &prefixes) {
        return vec![Literals::Values(values)];
    }
    literals.extend(usable(&prefixes).map(Literals::Prefixes));
    let suffixes = extract(hir, ExtractKind::Suffix);
    literals.extend(usable(&suffixes).map(Literals::Suffixes));
    literals.extend(parts(hir, true).map(Literals::Parts));
    literals
}

fn extract(hir: &Hir, kind: ExtractKind) -> Seq {
    let mut extractor = Extractor::new();
    extractor
        .kind(kind)
        .limit_total(MAX_ALTERNATIVES)
        .limit_literal_len(MAX_LITERAL_BYTES);
    extractor.extract(hir)
}

/// Returns all matching values, if there are only a few. If the expression has an assertion such as
/// `\b`, some of the returned values may not match. A returned value that does not match is
/// harmless, because the expression itself is evaluated as well.
fn whole_values(hir: &Hir, prefixes: &Seq) -> Option<Box<[Box<str>]>> {
    let literals = prefixes.literals().filter(|literals| {
        !literals.is_empty() && literals.iter().all(|literal| literal.is_exact())
    })?;
    debug_assert!(
        hir.properties().maximum_len().is_some(),
        "a finite language"
    );
    let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(Box::from);
    literals
        .iter()
        .map(|literal| text(literal.as_bytes()))
        .collect()
}

/// Returns the literals of `seq`, if there are only a few and all of them are nonempty.
fn usable(seq: &Seq) -> Option<Box<[Box<[u8]>]>> {
    let literals = seq.literals()?;
    let is_usable = !literals.is_empty() && literals.iter().all(|literal| !literal.is_empty());
    is_usable.then(|| {
        literals
            .iter()
            .map(|literal| literal.as_bytes().into())
            .collect()
    })
}

/// Returns the most specific literals that occur in every match of `hir`. If `hir` is the whole
/// expression (`is_whole`), literals at its start are excluded, because they are already included
/// as prefixes.
fn parts(hir: &Hir, is_whole: bool) -> Option<Box<[Box<[u8]>]>> {
    match hir.kind() {
        HirKind::Capture(capture) => parts(&capture.sub, is_whole),
        HirKind::Repetition(repetition) if repetition.min > 0 => parts(&repetition.sub, false),
        HirKind::Concat(hirs) => {
            let places = usize::from(is_whole)..hirs.len().min(MAX_STARTS);
            // A literal at the start of a later part of a concatenation occurs inside the whole
            // match.
            let starts = places.clone().filter_map(|start| {
                let rest = Hir::concat(hirs[start..].to_vec());
                usable(&extract(&rest, ExtractKind::Prefix))
            });
            let inner = hirs[places].iter().filter_map(|hir| parts(hir, false));
            starts.chain(inner).max_by_key(|found| rank(found))
        }
        HirKind::Alternation(hirs) => {
            let mut all = Vec::new();
            for hir in hirs {
                all.extend(parts(hir, false)?);
                if all.len() > MAX_ALTERNATIVES {
                    return None;
                }
            }
            Some(all.into())
        }
        _ if is_whole => None,
        _ => usable(&extract(hir, ExtractKind::Prefix)),
    }
}

/// Ranks literal lists by specificity. Of two lists, the list whose shortest literal is longer is
/// more specific. Of two lists with equally long shortest literals, the list with fewer literals is
/// more specific.
fn rank(literals: &[Box<[u8]>]) -> (usize, std::cmp::Reverse<usize>) {
    let shortest = literals.iter().map(|literal| literal.len()).min();
    (shortest.unwrap_or(0), std::cmp::Reverse(literals.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the required literals of the regular expression `source`, formatted as strings.
    fn literals_of(source: &str) -> Vec<String> {
        let hir = regex_syntax::parse(source).unwrap();
        let text = |literals: &[Box<[u8]>]| {
            let texts = literals
                .iter()
                .map(|bytes| String::from_utf8_lossy(bytes).into_owned());
            texts.collect::<Vec<_>>().join(" ")
        };
        let of = |literals: Literals| match literals {
            Literals::Values(values) => format!("= {}", values.join(" ")),
            Literals::Prefixes(found) => format!("^ {}", text(&found)),
            Literals::Suffixes(found) => format!("$ {}", text(&found)),
            Literals::Parts(found) => format!("~ {}", text(&found)),
        };
        super::of(&hir).into_iter().map(of).collect()
    }

    #[test]
    fn a_regular_expression_is_indexed_by_its_required_literals() {
        assert_eq!(literals_of("GET|POST"), ["= GET POST"]);
        assert_eq!(literals_of(".*bot.*"), ["~ bot"]);
        assert_eq!(literals_of("/v[12]+/c17/.*"), ["^ /v1 /v2", "~ /c17/"]);
        assert_eq!(
            literals_of(".*[.](php|asp)"),
            ["$ .php .asp", "~ .php .asp"]
        );
        assert_eq!(literals_of("(?i).*a-b.*"), ["~ A-B A-b a-B a-b"]);
        assert_eq!(literals_of(".*(foo|ba+r).*"), ["~ foo ba"]);
        assert!(literals_of(".*").is_empty());
        assert!(literals_of(r"\w+x?").is_empty());
        assert!(literals_of("(foo)?.*").is_empty());
    }
}
