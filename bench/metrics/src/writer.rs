//! The writer for the Prometheus text format that Tidegate used before `prometheus-client`.

use std::fmt::Write as _;

/// A page of metrics. Writing to a `String` cannot fail, so the results are ignored.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// Writes the HELP and TYPE lines of the metric `name`.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Writes a sample of the metric `name`.
    pub fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: u64) {
        self.0.push_str(name);
        let mut separator = '{';
        for (label, text) in labels {
            let _ = write!(self.0, "{separator}{label}=\"");
            self.escaped(text);
            self.0.push('"');
            separator = ',';
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// Returns the page.
    #[must_use]
    pub fn finish(self) -> String {
        self.0
    }

    fn escaped(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                '\\' => self.0.push_str("\\\\"),
                '"' => self.0.push_str("\\\""),
                '\n' => self.0.push_str("\\n"),
                c => self.0.push(c),
            }
        }
    }
}
