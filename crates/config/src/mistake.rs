//! An error or a warning about the rules file.

use std::fmt;

/// An error or a warning about the rules file, with its position and advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The path of the value, such as `rules[2].limits[0].refill`; empty for the file as a whole.
    pub path: String,
    /// The line, counted from 1; `None` if the problem has no line.
    pub line: Option<usize>,
    /// The description of the problem: usually the expected and the actual value, and advice.
    pub message: String,
}

impl Mistake {
    /// Returns the code at the start of a warning, such as `no-match`. Returns `None` for errors,
    /// and for warnings without a code.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        let (code, _) = self.message.split_once(": ")?;
        let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (code.contains('-') && code.bytes().all(is_part)).then_some(code)
    }

    /// Returns the problem, without the code and the advice.
    #[must_use]
    pub fn problem(&self) -> &str {
        let text = self.text();
        text.split_once("; ").map_or(text, |(problem, _)| problem)
    }

    /// Returns the advice: the part of the message that says how to fix the problem. Returns `None`
    /// if the message has no advice.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        self.text().split_once("; ").map(|(_, advice)| advice)
    }

    fn text(&self) -> &str {
        let code = self.code().and_then(|code| self.message.strip_prefix(code));
        code.and_then(|rest| rest.strip_prefix(": "))
            .unwrap_or(&self.message)
    }
}

/// Formats the error like this:
/// `rules[2].limits[0].refill (line 31): expected a rate such as 20/min`.
impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.path.as_str(), self.line) {
            ("", None) => f.write_str(&self.message),
            ("", Some(line)) => write!(f, "line {line}: {}", self.message),
            (path, None) => write!(f, "{path}: {}", self.message),
            (path, Some(line)) => write!(f, "{path} (line {line}): {}", self.message),
        }
    }
}
