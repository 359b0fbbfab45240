//! The rules file as a tree that knows its lines.
//!
//! YAML is parsed by a library; what is kept of it here is what a rules file needs: maps, lists and
//! scalars. Aliases, which can make a small file enormous, and a key that stands twice are refused.

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span};

use super::Mistake;

/// The most entries of one map: no map of a rules file has nearly so many.
const MAX_ENTRIES: usize = 1_024;

/// How deep maps and lists may lie inside each other.
const MAX_DEPTH: usize = 64;

/// A value and the line on which it begins.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: usize,
    pub(super) value: Value,
}

#[derive(Debug)]
pub(super) enum Value {
    Null,
    /// A scalar; `plain` if it stands without quotes, and so may mean a number or a truth.
    Scalar {
        text: String,
        plain: bool,
    },
    List(Vec<Node>),
    Map(Vec<(Key, Node)>),
}

#[derive(Debug)]
pub(super) struct Key {
    pub(super) text: String,
    pub(super) line: usize,
}

impl Node {
    /// What the value is, for whoever expected something else.
    pub(super) fn describe(&self) -> String {
        match &self.value {
            Value::Null => "nothing".to_owned(),
            Value::Scalar { text, plain: true } if text.parse::<f64>().is_ok() => {
                format!("the number {text}")
            }
            Value::Scalar { text, plain: true } if text == "true" || text == "false" => {
                text.clone()
            }
            Value::Scalar { text, .. } => format!("\"{}\"", shortened(text)),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a map".to_owned(),
        }
    }
}

/// A text short enough to be quoted in a message.
pub(super) fn shortened(text: &str) -> String {
    const MOST: usize = 60;
    if text.chars().count() <= MOST {
        return text.to_owned();
    }
    text.chars().take(MOST).chain("…".chars()).collect()
}

/// Parses one YAML document; an empty file is an empty map.
pub(super) fn parse(text: &str) -> Result<Node, Mistake> {
    let mut events = Events {
        parser: Parser::new_from_str(text),
    };
    let mut root = None;
    loop {
        match events.next()? {
            (Event::StreamEnd, _) => break,
            (
                Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing,
                _,
            ) => {}
            (_, span) if root.is_some() => {
                return Err(mistake(
                    span.start.line(),
                    "a second document begins here; a rules file is one document",
                ));
            }
            (event, span) => root = Some(events.node(event, span, 0)?),
        }
    }
    Ok(root.unwrap_or(Node {
        line: 1,
        value: Value::Map(Vec::new()),
    }))
}

struct Events<'t> {
    parser: Parser<'t, saphyr_parser::StrInput<'t>>,
}

impl<'t> Events<'t> {
    fn next(&mut self) -> Result<(Event<'t>, Span), Mistake> {
        match self.parser.next() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => Err(no_yaml(&error)),
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'t>, span: Span, depth: usize) -> Result<Node, Mistake> {
        let line = span.start.line();
        if depth > MAX_DEPTH {
            return Err(mistake(
                line,
                &format!("maps and lists lie over {MAX_DEPTH} deep inside each other"),
            ));
        }
        let value = match event {
            Event::Scalar(text, style, ..) => scalar(&text, style),
            Event::SequenceStart(..) => self.list(depth)?,
            Event::MappingStart(..) => self.map(depth)?,
            Event::Alias(_) => {
                return Err(mistake(
                    line,
                    "aliases are not supported; write the value out",
                ));
            }
            _ => return Err(mistake(line, "expected a value")),
        };
        Ok(Node { line, value })
    }

    fn list(&mut self, depth: usize) -> Result<Value, Mistake> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(Value::List(items)),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Value, Mistake> {
        let mut entries: Vec<(Key, Node)> = Vec::new();
        loop {
            let (text, line) = match self.next()? {
                (Event::MappingEnd, _) => return Ok(Value::Map(entries)),
                (Event::Scalar(text, ..), span) => (text.into_owned(), span.start.line()),
                (_, span) => return Err(mistake(span.start.line(), "a key must be a plain word")),
            };
            if let Some((first, _)) = entries.iter().find(|(key, _)| key.text == text) {
                let problem = format!(
                    "`{text}` stands twice in this map; the first is on line {}",
                    first.line
                );
                return Err(mistake(line, &problem));
            }
            if entries.len() == MAX_ENTRIES {
                let problem = format!("this map has over {MAX_ENTRIES} entries");
                return Err(mistake(line, &problem));
            }
            let (event, span) = self.next()?;
            entries.push((Key { text, line }, self.node(event, span, depth + 1)?));
        }
    }
}

fn scalar(text: &str, style: ScalarStyle) -> Value {
    let plain = style == ScalarStyle::Plain;
    if plain && matches!(text, "" | "~" | "null") {
        return Value::Null;
    }
    Value::Scalar {
        text: text.to_owned(),
        plain,
    }
}

fn mistake(line: usize, message: &str) -> Mistake {
    Mistake {
        path: String::new(),
        line: Some(line),
        message: message.to_owned(),
    }
}

fn no_yaml(error: &ScanError) -> Mistake {
    let marker = error.marker();
    let message = format!(
        "this is no YAML, column {}: {}",
        marker.col() + 1,
        error.info()
    );
    Mistake {
        path: String::new(),
        line: Some(marker.line()),
        message,
    }
}
