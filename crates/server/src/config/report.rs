//! Every mistake of a file, gathered while it is read.

use super::Mistake;

/// The most mistakes that one report lists.
const MAX_MISTAKES: usize = 1_000;

/// The longest key for which a similar one is looked for.
const MAX_GUESSED_BYTES: usize = 64;

/// The most characters of a value that a message shows.
const MAX_SHOWN: usize = 60;

/// What is wrong with a file, and what will not do what its author may expect.
#[derive(Debug, Default)]
pub(crate) struct Report {
    mistakes: Vec<Mistake>,
    warnings: Vec<Mistake>,
    unlisted: usize,
}

impl Report {
    pub(crate) fn mistake(&mut self, mistake: Mistake) {
        if self.mistakes.len() < MAX_MISTAKES {
            self.mistakes.push(mistake);
        } else {
            self.unlisted += 1;
        }
    }

    pub(crate) fn warn(&mut self, warning: Mistake) {
        self.warnings.push(warning);
    }

    /// How many mistakes there are so far.
    pub(crate) fn count(&self) -> usize {
        self.mistakes.len() + self.unlisted
    }

    /// The warnings, or all mistakes, in the order of their lines.
    pub(crate) fn finish(mut self) -> Result<Vec<Mistake>, Vec<Mistake>> {
        if self.mistakes.is_empty() {
            self.warnings.sort_by_key(|warning| warning.line);
            return Ok(self.warnings);
        }
        self.mistakes.sort_by_key(|mistake| mistake.line);
        if self.unlisted > 0 {
            let message = format!("and {} mistakes more", self.unlisted);
            self.mistakes.push(Mistake {
                path: String::new(),
                line: None,
                message,
            });
        }
        Err(self.mistakes)
    }
}

/// What to say of a key that is none of `known`.
pub(crate) fn unknown_key(key: &str, known: &[&str]) -> String {
    format!("unknown key `{}`; {}", shown(key), advice(key, known))
}

/// What to say to somebody who wrote `word` where only `known` words are.
pub(crate) fn advice(word: &str, known: &[&str]) -> String {
    match nearest(word, known) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => format!("known are {}", known.join(", ")),
    }
}

/// The one of `known` that `word` was probably meant to be.
pub(crate) fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    if word.len() > MAX_GUESSED_BYTES {
        return None;
    }
    let distances = known
        .iter()
        .map(|known| (strsim::damerau_levenshtein(word, known), *known));
    let (distance, nearest) = distances.min_by_key(|(distance, _)| *distance)?;
    let tolerated = (nearest.len().max(word.len()) / 3).max(1);
    (distance <= tolerated).then_some(nearest)
}

/// What stands in a message for a value that may hold a secret.
pub(crate) const HIDDEN: &str = "(not shown: it may hold a secret)";

/// Whether a text looks like a URL with a password in it.
pub(crate) fn may_hold_secret(text: &str) -> bool {
    text.contains("://") && text.contains('@')
}

/// A text that somebody wrote as a message shows it: on one line, cut short, and not at all if it may hold a secret.
/// Messages are logged, and stand on `/readyz`.
pub(crate) fn shown(text: &str) -> String {
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
