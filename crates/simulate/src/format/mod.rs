//! Log formats: the known formats, format strings, and the detection of a format from a log's first
//! lines.

mod csv;
mod directives;
mod json;
mod names;
mod recorded;
mod template;

use http::HeaderName;

use self::{
    csv::Csv,
    json::JsonLogFields,
    template::{LineTemplate, TemplateVariable},
};
use crate::{
    field::{EntryMapping, Field},
    record::LogRecord,
    timestamp::TimeForm,
};

/// The number of lines that are used to detect a format.
pub(crate) const SAMPLE_LINES: usize = 64;

/// A format is detected only if it matches at least one of every `LINES_PER_MATCH` lines.
const LINES_PER_MATCH: usize = 10;

const COMBINED: &str = r#"$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent "$http_referer" "$http_user_agent""#;

/// The names of the known formats, for `--format`.
const NAMES: &[&str] = &[
    "combined",
    "main",
    "common",
    "vhost_combined",
    "caddy",
    "tidegate",
    recorded::NAME,
    "json",
    "csv",
    "traefik",
    "envoy",
    "haproxy",
];

/// The error for a line that does not match a format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LineError {
    /// The one-based column of the first character that does not match.
    pub(crate) column: usize,
    pub(crate) problem: String,
}

impl LineError {
    /// Creates an error at the byte `at` of `line`.
    pub(crate) fn at(line: &str, at: usize, problem: String) -> Self {
        let before = line.get(..at).unwrap_or(line);
        Self {
            column: before.chars().count() + 1,
            problem,
        }
    }
}

/// The format of the log, as requested.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Detected from the first lines of each file.
    #[default]
    Detect,
    /// A known format with this name.
    Named(&'static str),
    /// nginx's `log_format`.
    Nginx(Box<str>),
    /// Apache's `LogFormat`.
    Apache(Box<str>),
}

impl LogFormat {
    /// Parses the name of a known format, an nginx `log_format` or an Apache `LogFormat`.
    ///
    /// # Errors
    ///
    /// Returns a description of the problem if `text` is invalid.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text == "auto" {
            return Ok(Self::Detect);
        }
        if let Some(name) = NAMES.iter().find(|name| **name == text) {
            return Ok(Self::Named(name));
        }
        if text.contains('$') {
            let template = directives::nginx(text)
                .map_err(|problem| format!("the nginx log format {problem}"))?;
            return Self::Nginx(text.into()).checked(&template);
        }
        if text.contains('%') {
            let template = directives::apache(text)
                .map_err(|problem| format!("the Apache log format {problem}"))?;
            return Self::Apache(text.into()).checked(&template);
        }
        let nearest = NAMES
            .iter()
            .max_by(|one, other| strsim::jaro(text, one).total_cmp(&strsim::jaro(text, other)));
        Err(format!(
            "`{text}` is not a known format; did you mean `{}`? Known formats are {}. \
             Otherwise give the nginx `log_format` (with `$`) or the Apache `LogFormat` (with `%`)",
            nearest.unwrap_or(&NAMES[0]),
            NAMES.join(", ")
        ))
    }

    fn checked(self, template: &LineTemplate) -> Result<Self, String> {
        if template.has_time() {
            return Ok(self);
        }
        Err("the format has no time, which a simulation needs: add a field such as $time_local or %t".to_owned())
    }
}

/// A format, with its line parser.
#[derive(Clone, Debug)]
pub(crate) struct CompiledFormat {
    pub(crate) name: String,
    parser: FormatParser,
}

#[derive(Clone, Debug)]
enum FormatParser {
    Template(LineTemplate),
    Json(JsonLogFields),
    Csv(Csv),
    /// Requests recorded by a Tidegate server.
    Recorded,
}

/// The error for a log without any line that matches the format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnknownFormat {
    /// The most similar format, or the requested format.
    pub(crate) nearest: String,
    pub(crate) error: LineError,
    /// The first line.
    pub(crate) line: String,
}

/// The format that is most similar to a line that matches no format.
struct NearestFormat<'s> {
    line: &'s str,
    nearest: Option<(String, LineError)>,
}

impl NearestFormat<'_> {
    /// Records the format `name`, which does not match the line, if it matches a longer part of the
    /// line than the format recorded before.
    fn note(&mut self, name: &str, error: LineError) {
        // A line that starts with a brace is treated as JSON, even if another format matches a
        // longer part of the line.
        let is_nearer = |(known, known_error): &(String, LineError)| {
            known != "json" && error.column > known_error.column
        };
        if self.nearest.as_ref().is_none_or(is_nearer) {
            self.nearest = Some((name.to_owned(), error));
        }
    }

    fn into_unknown(self) -> UnknownFormat {
        let differs = || LineError::at(self.line, 0, "most lines differ".to_owned());
        let (nearest, error) = self
            .nearest
            .unwrap_or_else(|| (NAMES[0].to_owned(), differs()));
        UnknownFormat {
            nearest,
            error,
            line: self.line.to_owned(),
        }
    }
}

impl CompiledFormat {
    /// Finds the format of a log whose first lines are `sample`. `sample` must not be empty.
    ///
    /// # Errors
    ///
    /// Returns [`UnknownFormat`] if no line matches.
    pub(crate) fn find(
        wanted: &LogFormat,
        sample: &[String],
        mappings: &[EntryMapping],
    ) -> Result<Self, UnknownFormat> {
        let first = sample.first().map_or("", String::as_str);
        let mut nearest = NearestFormat {
            line: first,
            nearest: None,
        };
        let candidates = match wanted {
            LogFormat::Detect => Self::detectable(sample, mappings, &mut nearest),
            LogFormat::Named(name) => Self::candidates_named(name, sample, mappings)?,
            LogFormat::Nginx(format) => Self::of_text("nginx", directives::nginx(format)),
            LogFormat::Apache(format) => Self::of_text("Apache", directives::apache(format)),
        };
        let mut best: Option<(usize, Self)> = None;
        for format in candidates {
            let matching = sample.iter().filter(|line| format.matches(line)).count();
            if matching > best.as_ref().map_or(0, |(matching, _)| *matching) {
                best = Some((matching, format));
            } else if let Err(error) = format.parse(first) {
                nearest.note(&format.name, error);
            }
        }
        // A few lines may match an incorrect format by chance.
        let least = match wanted {
            LogFormat::Detect => sample.len().div_ceil(LINES_PER_MATCH),
            LogFormat::Named(_) | LogFormat::Nginx(_) | LogFormat::Apache(_) => 1,
        };
        let Some((_, mut format)) = best.filter(|(matching, _)| *matching >= least) else {
            return Err(nearest.into_unknown());
        };
        if let FormatParser::Template(template) = &mut format.parser
            && let Err(problem) = template.map(mappings)
        {
            return Err(UnknownFormat {
                nearest: format.name,
                error: LineError::at(first, 0, problem),
                line: first.to_owned(),
            });
        }
        Ok(format)
    }

    /// Returns all formats that can be detected from the lines.
    fn detectable(
        sample: &[String],
        mappings: &[EntryMapping],
        nearest: &mut NearestFormat<'_>,
    ) -> Vec<Self> {
        let first = nearest.line;
        let mut formats = Self::candidates();
        let objects = sample.iter().filter(|line| line.starts_with('{')).count();
        // Some lines may be damaged, so half of the lines must be JSON objects.
        if objects > 0 && objects * 2 >= sample.len() {
            formats.insert(0, Self::recorded());
            if sample.iter().any(|line| recorded::parse(line).is_ok()) {
                return formats;
            }
            match JsonLogFields::detect(sample, mappings) {
                Ok(json) => formats.insert(0, Self::of_json(json)),
                Err(error) => nearest.note("json", error),
            }
            return formats;
        }
        match Csv::new(first, mappings) {
            Ok(csv) => formats.push(Self::of_csv(csv)),
            // A first line with a comma may be a CSV header, unless it contains certain other
            // punctuation.
            Err(error) if first.contains(',') && !first.contains(['[', '"', ' ']) => {
                nearest.note("csv", error);
            }
            Err(_) => {}
        }
        formats
    }

    /// Parses a line.
    pub(crate) fn parse<'l>(&self, line: &'l str) -> Result<LogRecord<'l>, LineError> {
        let record = match &self.parser {
            FormatParser::Template(template) => template.parse(line)?,
            FormatParser::Json(json) => json.parse(line)?,
            FormatParser::Csv(csv) => csv.parse(line)?,
            FormatParser::Recorded => recorded::parse(line)?,
        };
        if record.time().is_none() {
            return Err(LineError::at(line, 0, "the line has no time".to_owned()));
        }
        Ok(record)
    }

    /// Returns true if the first line of the log is a header.
    pub(crate) fn has_header(&self) -> bool {
        matches!(self.parser, FormatParser::Csv(_))
    }

    /// Returns true if the line matches this format.
    fn matches(&self, line: &str) -> bool {
        self.parse(line).is_ok()
    }

    fn candidates() -> Vec<Self> {
        let names = NAMES.iter().filter_map(|name| Self::known(name));
        let mut known: Vec<Self> = names.collect();
        // Many servers append additional fields to the combined format.
        known.extend(Self::of_text(
            "combined, with further fields that are not used",
            directives::nginx(&format!("{COMBINED} $rest")),
        ));
        known
    }

    fn candidates_named(
        name: &str,
        sample: &[String],
        mappings: &[EntryMapping],
    ) -> Result<Vec<Self>, UnknownFormat> {
        let first = sample.first().map_or("", String::as_str);
        let unknown = |error| UnknownFormat {
            nearest: name.to_owned(),
            error,
            line: first.to_owned(),
        };
        Ok(match name {
            "json" | "caddy" | "tidegate" => {
                vec![Self::of_json(
                    JsonLogFields::detect(sample, mappings).map_err(unknown)?,
                )]
            }
            "csv" => vec![Self::of_csv(Csv::new(first, mappings).map_err(unknown)?)],
            _ if name == "traefik" && first.starts_with('{') => {
                vec![Self::of_json(
                    JsonLogFields::detect(sample, mappings).map_err(unknown)?,
                )]
            }
            recorded::NAME => vec![Self::recorded()],
            _ => Self::known(name).into_iter().collect(),
        })
    }

    /// Returns the known template with this name.
    fn known(name: &str) -> Option<Self> {
        let template = match name {
            "combined" => directives::nginx(COMBINED),
            "main" => directives::nginx(&format!("{COMBINED} \"$http_x_forwarded_for\"")),
            "common" => directives::apache(r#"%h %l %u %t "%r" %>s %b"#),
            "vhost_combined" => directives::apache(
                r#"%v:%p %h %l %u %t "%r" %>s %O "%{Referer}i" "%{User-Agent}i""#,
            ),
            "traefik" => traefik(),
            "envoy" => envoy(),
            "haproxy" => haproxy(),
            _ => return None,
        };
        let parser = FormatParser::Template(template.ok()?);
        Some(Self {
            name: name.to_owned(),
            parser,
        })
    }

    fn of_text(name: &str, template: Result<LineTemplate, String>) -> Vec<Self> {
        // A format string given by the user has already been compiled successfully.
        let template = template.ok();
        let format = template.map(|template| Self {
            name: name.to_owned(),
            parser: FormatParser::Template(template),
        });
        format.into_iter().collect()
    }

    fn recorded() -> Self {
        Self {
            name: recorded::NAME.to_owned(),
            parser: FormatParser::Recorded,
        }
    }

    fn of_json(json: JsonLogFields) -> Self {
        Self {
            name: json.name.to_owned(),
            parser: FormatParser::Json(json),
        }
    }

    fn of_csv(csv: Csv) -> Self {
        Self {
            name: "csv".to_owned(),
            parser: FormatParser::Csv(csv),
        }
    }
}

fn variable(name: &str, field: Option<Field>, after: &str) -> TemplateVariable {
    TemplateVariable {
        name: name.into(),
        field,
        after: after.into(),
    }
}

fn response(name: &str) -> Option<Field> {
    Some(Field::Response(name.into()))
}

/// Traefik's Common Log Format. The time is the arrival time.
fn traefik() -> Result<LineTemplate, String> {
    LineTemplate::new(
        "",
        vec![
            variable("ClientHost", Some(Field::Peer), " - "),
            variable("ClientUsername", None, " ["),
            variable("StartUTC", Some(Field::Arrival(TimeForm::Any)), "] \""),
            variable("request", Some(Field::RequestLine), "\" "),
            variable("OriginStatus", response("status"), " "),
            variable("OriginContentSize", response("bytes"), " \""),
            variable("Referer", None, "\" \""),
            variable(
                "UserAgent",
                Some(Field::Header(http::header::USER_AGENT)),
                "\" ",
            ),
            variable("RequestCount", None, " \""),
            variable("RouterName", None, "\" \""),
            variable("ServiceURL", None, "\" "),
            variable("Duration", None, "ms"),
        ],
    )
}

/// Envoy's default format. The format does not contain the peer address, but with
/// `use_remote_address`, Envoy appends the peer address to `X-Forwarded-For`. In client values,
/// Envoy does not escape quotation marks and backslashes.
fn envoy() -> Result<LineTemplate, String> {
    let template = LineTemplate::new(
        "[",
        vec![
            variable("START_TIME", Some(Field::Arrival(TimeForm::Any)), "] \""),
            variable("request", Some(Field::RequestLine), "\" "),
            variable("RESPONSE_CODE", response("status"), " "),
            variable("RESPONSE_FLAGS", None, " "),
            variable("BYTES_RECEIVED", None, " "),
            variable("BYTES_SENT", response("bytes"), " "),
            variable("DURATION", None, " "),
            variable("UPSTREAM_SERVICE_TIME", None, " \""),
            variable("X-FORWARDED-FOR", Some(Field::ForwardedForAndPeer), "\" \""),
            variable(
                "USER-AGENT",
                Some(Field::Header(http::header::USER_AGENT)),
                "\" \"",
            ),
            variable(
                "X-REQUEST-ID",
                Some(Field::Header(HeaderName::from_static("x-request-id"))),
                "\" \"",
            ),
            variable("AUTHORITY", Some(Field::Host), "\" \""),
            variable("UPSTREAM_HOST", None, "\""),
        ],
    );
    template.map(LineTemplate::without_escapes)
}

/// HAProxy's `option httplog`, after the syslog header. Captured headers are not used.
fn haproxy() -> Result<LineTemplate, String> {
    let template = LineTemplate::new(
        "",
        vec![
            variable("client", Some(Field::PeerAndPort), " ["),
            variable("accept_date", Some(Field::Arrival(TimeForm::Any)), "] "),
            variable("frontend", None, " "),
            variable("backend", None, " "),
            variable("timers", None, " "),
            variable("status", response("status"), " "),
            variable("bytes", response("bytes"), " "),
            variable("request_cookie", None, " "),
            variable("response_cookie", None, " "),
            variable("termination_state", None, " "),
            variable("connections", None, " "),
            variable("queues_and_captures", None, " \""),
            variable("request", Some(Field::RequestLine), "\""),
        ],
    )?;
    Ok(template.after_prefix("haproxy[", "]: "))
}

/// Parses the first [`SAMPLE_LINES`] lines of `text` in every format. The detection of formats
/// reads the same lines.
#[cfg(any(test, fuzzing))]
pub(crate) fn parse_all(text: &str) {
    let mut sample: Vec<String> = text.lines().map(str::to_owned).collect();
    sample.truncate(SAMPLE_LINES);
    let first = sample.first().map_or("", String::as_str);
    let mut formats = CompiledFormat::candidates();
    formats.push(CompiledFormat::recorded());
    formats.extend(JsonLogFields::detect(&sample, &[]).map(CompiledFormat::of_json));
    formats.extend(Csv::new(first, &[]).map(CompiledFormat::of_csv));
    formats.extend(CompiledFormat::find(&LogFormat::Detect, &sample, &[]));
    if let Ok(LogFormat::Nginx(format) | LogFormat::Apache(format)) = LogFormat::parse(first) {
        formats.extend(CompiledFormat::of_text("nginx", directives::nginx(&format)));
        formats.extend(CompiledFormat::of_text(
            "Apache",
            directives::apache(&format),
        ));
    }
    for format in formats {
        for line in &sample {
            if let Ok(record) = format.parse(line) {
                // A parsed line always has a time.
                assert!(record.arrival().is_some());
                let _ = record.into_parts();
            }
        }
    }
}

#[cfg(test)]
mod tests;
