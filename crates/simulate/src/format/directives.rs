//! Compiles nginx and Apache format strings to templates.

use http::HeaderName;

use super::template::{LineTemplate, TemplateVariable};
use crate::{field::Field, timestamp::TimeForm};

/// Compiles an nginx `log_format`, such as `$remote_addr [$time_local] "$request"`.
pub(crate) fn nginx(format: &str) -> Result<LineTemplate, String> {
    let mut pieces = format.split('$');
    let head = pieces.next().unwrap_or_default();
    let mut variables = Vec::new();
    for piece in pieces {
        let (name, after) = match piece.strip_prefix('{') {
            Some(braced) => braced
                .split_once('}')
                .ok_or_else(|| "has a `${` without a `}`".to_owned())?,
            None => {
                let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
                let end = piece.bytes().position(|byte| !is_name(byte));
                piece.split_at(end.unwrap_or(piece.len()))
            }
        };
        if name.is_empty() {
            return Err("has a `$` that is not followed by a variable name".to_owned());
        }
        variables.push(TemplateVariable {
            name: name.into(),
            field: nginx_field(name),
            after: after.into(),
        });
    }
    // If the format contains the whole target, such as `$request_uri`, variables with parts of the
    // target are not used.
    if variables
        .iter()
        .any(|variable| variable.field == Some(Field::Target))
    {
        for variable in &mut variables {
            if matches!(variable.field, Some(Field::Path | Field::Query)) {
                variable.field = None;
            }
        }
    }
    LineTemplate::new(head, variables)
}

fn nginx_field(name: &str) -> Option<Field> {
    Some(match name {
        "remote_addr" => Field::Peer,
        "time_local" | "time_iso8601" | "msec" => Field::Completion(TimeForm::Any),
        "request_time" => Field::Duration(1_000_000),
        "request" => Field::RequestLine,
        "request_method" => Field::Method,
        "request_uri" => Field::Target,
        "uri" | "document_uri" => Field::Path,
        "args" | "query_string" => Field::Query,
        "host" => Field::Host,
        "proxy_add_x_forwarded_for" => Field::ForwardedForAndPeer,
        "status" => Field::Response("status".into()),
        "body_bytes_sent" => Field::Response("bytes".into()),
        _ => {
            let header = |name: &str| name.replace('_', "-");
            if let Some(name) = name.strip_prefix("http_") {
                Field::Header(HeaderName::from_bytes(header(name).as_bytes()).ok()?)
            } else if let Some(name) = name.strip_prefix("cookie_") {
                Field::Cookie(name.into())
            } else if let Some(name) = name.strip_prefix("arg_") {
                Field::Parameter(name.into())
            } else {
                let name = name.strip_prefix("sent_http_")?;
                Field::Response(format!("header.{}", header(name)).into())
            }
        }
    })
}

/// Compiles an Apache `LogFormat`, such as `%h %l %u %t "%r" %>s %b`.
pub(crate) fn apache(format: &str) -> Result<LineTemplate, String> {
    let mut compiler = ApacheCompiler::default();
    let mut rest = format;
    while let Some(at) = rest.find(['%', '\\']) {
        compiler.literal(&rest[..at]);
        if let Some(escaped) = rest[at..].strip_prefix('\\') {
            let escape = escaped.chars().next().ok_or("ends with a backslash")?;
            compiler.literal(match escape {
                'n' => "\n",
                't' => "\t",
                other => &escaped[..other.len_utf8()],
            });
            rest = &escaped[escape.len_utf8()..];
            continue;
        }
        rest = compiler.directive(&rest[at + 1..])?;
    }
    compiler.literal(rest);
    let ApacheCompiler { head, variables } = compiler;
    LineTemplate::new(&head, variables)
}

#[derive(Debug, Default)]
struct ApacheCompiler {
    head: String,
    variables: Vec<TemplateVariable>,
}

impl ApacheCompiler {
    /// Adds a literal string after the last variable.
    fn literal(&mut self, text: &str) {
        match self.variables.last_mut() {
            None => self.head.push_str(text),
            Some(last) => last.after = format!("{}{text}", last.after).into(),
        }
    }

    /// Compiles a directive. `rest` is the string after the directive's `%`. Returns the string
    /// after the directive.
    fn directive<'t>(&mut self, rest: &'t str) -> Result<&'t str, String> {
        if let Some(rest) = rest.strip_prefix('%') {
            self.literal("%");
            return Ok(rest);
        }
        // Skip Apache's modifiers: `<` and `>` select the original or the final request of an
        // internal redirect, and `400,501` and `!200` the statuses for which the value is logged.
        let is_modifier = |c: char| c.is_ascii_digit() || matches!(c, '<' | '>' | '!' | ',');
        let rest = rest.trim_start_matches(is_modifier);
        let (argument, rest) = match rest.strip_prefix('{') {
            Some(braced) => {
                let split = braced.split_once('}').ok_or("has a `%{` without a `}`")?;
                (Some(split.0), split.1)
            }
            None => (None, rest),
        };
        let kind = rest.strip_prefix('^').unwrap_or(rest);
        let length = if kind.len() < rest.len() { 2 } else { 1 };
        let letter = kind
            .chars()
            .next()
            .ok_or("has a `%` that is not followed by a directive")?;
        if !letter.is_ascii_alphabetic() {
            return Err(format!("has `%{letter}`, which is not a directive"));
        }
        let is_bracketed = letter == 't' && argument.is_none();
        if is_bracketed {
            self.literal("[");
        }
        let name = match argument {
            Some(argument) if matches!(letter, 't' | 'T') => format!("{{{argument}}}{letter}"),
            Some(argument) => argument.to_owned(),
            None => letter.to_string(),
        };
        self.variables.push(TemplateVariable {
            name: name.into(),
            field: if length == 2 {
                None
            } else {
                apache_field(letter, argument)
            },
            after: "".into(),
        });
        if is_bracketed {
            self.literal("]");
        }
        // A caret is followed by two letters, as in `%^FB`.
        let used = if length == 2 { 3 } else { 1 };
        rest.get(used..)
            .ok_or_else(|| "has a `%^` that is not followed by a directive".to_owned())
    }
}

fn apache_field(letter: char, argument: Option<&str>) -> Option<Field> {
    Some(match (letter, argument) {
        ('h' | 'a', None) => Field::Peer,
        ('t', None) => Field::Arrival(TimeForm::Any),
        ('t', Some(form)) => {
            let (is_end, form) = match (form.strip_prefix("end:"), form.strip_prefix("begin:")) {
                (Some(form), _) => (true, form),
                (_, Some(form)) => (false, form),
                _ => (false, form),
            };
            let form = match form {
                "sec" | "msec" | "usec" => TimeForm::Any,
                "msec_frac" | "usec_frac" => return None,
                _ => TimeForm::Pattern(form.into()),
            };
            if is_end {
                Field::Completion(form)
            } else {
                Field::Arrival(form)
            }
        }
        ('D', None) | ('T', Some("us")) => Field::Duration(1),
        ('T', Some("ms")) => Field::Duration(1_000),
        ('T', _) => Field::Duration(1_000_000),
        ('r', None) => Field::RequestLine,
        ('m', None) => Field::Method,
        ('U', None) => Field::Path,
        ('q', None) => Field::Query,
        ('v' | 'V', None) => Field::Host,
        ('s', None) => Field::Response("status".into()),
        ('b' | 'B', None) => Field::Response("bytes".into()),
        ('i', Some(name)) => Field::Header(HeaderName::from_bytes(name.as_bytes()).ok()?),
        ('C', Some(name)) => Field::Cookie(name.into()),
        ('o', Some(name)) => Field::Response(format!("header.{}", name.to_lowercase()).into()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(template: &LineTemplate) -> Vec<(&str, &str)> {
        let variables = template.variables.iter();
        variables
            .map(|variable| (&*variable.name, &*variable.after))
            .collect()
    }

    #[test]
    fn nginx_formats_are_compiled() {
        let template = nginx("<$remote_addr> ${time_local}x $http_x_api_key").unwrap();
        assert_eq!(&*template.head, "<");
        let expected = [
            ("remote_addr", "> "),
            ("time_local", "x "),
            ("http_x_api_key", ""),
        ];
        assert_eq!(names(&template), expected);
        let header = HeaderName::from_static("x-api-key");
        assert_eq!(template.variables[2].field, Some(Field::Header(header)));
        for (format, problem) in [
            (
                "$remote_addr$status",
                "`remote_addr` and `status` have no text between them, so the end of the first cannot be found",
            ),
            ("no variables", "has no variables"),
            ("$ x", "has a `$` that is not followed by a variable name"),
            ("${x", "has a `${` without a `}`"),
        ] {
            assert_eq!(nginx(format).unwrap_err(), problem);
        }
    }

    #[test]
    fn apache_formats_are_compiled() {
        let template =
            apache(r#"%v:%p %h %t \"%r\" %>s %{X-Key}i %400,501{Host}i %{ms}T%%"#).unwrap();
        let expected = [
            ("v", ":"),
            ("p", " "),
            ("h", " ["),
            ("t", "] \""),
            ("r", "\" "),
            ("s", " "),
            ("X-Key", " "),
            ("Host", " "),
            ("{ms}T", "%"),
        ];
        assert_eq!(names(&template), expected);
        let custom = apache("%{%Y-%m-%d %H:%M:%S}t %a").unwrap();
        let pattern = TimeForm::Pattern("%Y-%m-%d %H:%M:%S".into());
        assert_eq!(custom.variables[0].field, Some(Field::Arrival(pattern)));
        for (format, problem) in [
            (
                "%h%s",
                "`h` and `s` have no text between them, so the end of the first cannot be found",
            ),
            ("%", "has a `%` that is not followed by a directive"),
            ("%{x", "has a `%{` without a `}`"),
            ("%^F", "has a `%^` that is not followed by a directive"),
            ("%!", "has a `%` that is not followed by a directive"),
            ("% h", "has `% `, which is not a directive"),
            ("x\\", "ends with a backslash"),
        ] {
            assert_eq!(apache(format).unwrap_err(), problem, "{format}");
        }
    }
}
