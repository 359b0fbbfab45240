//! Commands in messages, in a form that a shell accepts.

/// Quotes `text` for a shell, if necessary.
pub(super) fn argument(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._/:=@%+,".contains(c);
    if text.chars().all(is_plain) {
        return text.to_owned();
    }
    let quoted = text.replace('\'', "'\\''");
    let quoted: String = quoted.chars().filter(|c| !c.is_control()).collect();
    format!("'{quoted}'")
}
