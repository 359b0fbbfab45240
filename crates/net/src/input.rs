//! Formats user input for messages, and suggests corrections for misspelt words.

use std::cmp::Reverse;

/// The maximum length of a word, in bytes, for which a similar word is suggested.
const MAX_GUESSED_BYTES: usize = 64;

/// The maximum length of a value in a message, in characters.
const MAX_SHOWN: usize = 60;

/// Returns a suggestion for a `word` that is not in `known`: the nearest known word, or all known
/// words.
pub fn advice(word: &str, known: &[&str]) -> String {
    match nearest(word, known) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => format!("expected one of {}", known.join(", ")),
    }
}

/// Returns the known word with the smallest edit distance to `word`, if the distance is small
/// enough for a typo. If several words have the same distance, returns the one with the longest
/// prefix in common with `word`.
pub fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    if word.len() > MAX_GUESSED_BYTES {
        return None;
    }
    let distances = known
        .iter()
        .map(|known| (strsim::damerau_levenshtein(word, known), *known));
    let common = |known: &str| {
        let pairs = word.bytes().zip(known.bytes());
        pairs.take_while(|(one, other)| one == other).count()
    };
    let (distance, nearest) =
        distances.min_by_key(|(distance, known)| (*distance, Reverse(common(known))))?;
    let tolerated = (nearest.len().max(word.len()) / 3).max(1);
    (distance <= tolerated).then_some(nearest)
}

/// The placeholder that messages show instead of a value that may contain a secret.
pub const HIDDEN: &str = "(not shown: it could contain a secret)";

/// Returns whether a string looks like a URL with a password.
pub fn may_hold_secret(text: &str) -> bool {
    text.contains("://") && text.contains('@')
}

/// Formats user input for a message: on one line, truncated, and hidden if the input may contain a
/// secret. Messages are logged and appear on `/readyz`, so they must not contain raw input.
pub fn shown(text: &str) -> String {
    if may_hold_secret(text) {
        return HIDDEN.to_owned();
    }
    let mut shown: String = text
        .chars()
        .take(MAX_SHOWN)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(MAX_SHOWN).is_some() {
        shown.push('…');
    }
    shown
}
