//! Quotes of invalid input in error messages.

/// The maximum length of a quote, in characters.
const MAX_SHOWN: usize = 40;

/// Returns the beginning of `text`, with control characters escaped, so that input cannot forge
/// lines in a log.
pub(crate) fn shown(text: &str) -> String {
    let mut shown = String::new();
    let mut chars = text.chars();
    for char in chars.by_ref().take(MAX_SHOWN) {
        if char.is_control() {
            shown.extend(char.escape_default());
        } else {
            shown.push(char);
        }
    }
    if chars.next().is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_and_control_characters_are_escaped() {
        assert_eq!(shown("20/min \"µ\""), "20/min \"µ\"");
        assert_eq!(shown("a\nb\u{1b}[31m"), "a\\nb\\u{1b}[31m");
        assert_eq!(shown(&"é".repeat(40)), "é".repeat(40));
        assert_eq!(shown(&"é".repeat(41)), format!("{}…", "é".repeat(40)));
    }
}
