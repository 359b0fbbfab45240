//! YAML as a tree of nodes that know their lines.
//!
//! The parser's events are taken one by one, so that every bound holds before anything is built that
//! could exceed it. Aliases are refused: what they stand for could be written out, and then it is bounded.
//! Whether a scalar is a number or a text is for its reader to say.

use std::borrow::Cow;

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError};

use super::Mistake;

/// The deepest nesting of lists and maps.
const MAX_DEPTH: usize = 64;

/// The most scalars, lists and maps in one file.
const MAX_NODES: usize = 4_000_000;

/// A value in the file, and where it stands.
#[derive(Debug)]
pub(super) struct Node<'t> {
    /// The line, from 1.
    pub(super) line: usize,
    pub(super) content: Content<'t>,
}

#[derive(Debug)]
pub(super) enum Content<'t> {
    /// Nothing: `~`, `null`, or no value at all.
    Empty,
    /// A scalar without quotes.
    Plain(Cow<'t, str>),
    /// A scalar in quotes, or a block of text.
    Quoted(Cow<'t, str>),
    List(Vec<Node<'t>>),
    /// Keys and values, in the order of the file, repeated keys included.
    Map(Vec<(Node<'t>, Node<'t>)>),
}

/// A list or a map whose end has not come yet.
enum Open<'t> {
    List(usize, Vec<Node<'t>>),
    Map(usize, Vec<(Node<'t>, Node<'t>)>, Option<Node<'t>>),
}

/// Reads the one document in `text`; nothing at all is [`Content::Empty`].
pub(super) fn parse(text: &str) -> Result<Node<'_>, Mistake> {
    let mut tree = Tree::default();
    let mut parser = Parser::new_from_str(text);
    while let Some(event) = parser.next_event() {
        let (event, span) = event.map_err(|error| not_yaml(&error))?;
        let line = span.start.line();
        if tree
            .take(event, line)
            .map_err(|message| mistake(line, message))?
            == Progress::Done
        {
            break;
        }
    }
    Ok(tree.root.unwrap_or(Node {
        line: 1,
        content: Content::Empty,
    }))
}

#[derive(Default)]
struct Tree<'t> {
    root: Option<Node<'t>>,
    open: Vec<Open<'t>>,
    nodes: usize,
}

#[derive(PartialEq, Eq)]
enum Progress {
    More,
    Done,
}

impl<'t> Tree<'t> {
    fn take(&mut self, event: Event<'t>, line: usize) -> Result<Progress, String> {
        match event {
            Event::Scalar(_, _, _, Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => {
                return Err("tags such as !!str are not taken; remove it".into());
            }
            Event::Alias(_) => {
                return Err("aliases are not taken; write out what it stands for".into());
            }
            Event::DocumentStart(_) if self.root.is_some() => {
                return Err("a second document begins here; a rules file is one document".into());
            }
            Event::Scalar(text, style, _, None) => {
                self.count()?;
                self.close(Node {
                    line,
                    content: scalar(text, style),
                });
            }
            Event::SequenceStart(_, None) => self.begin(Open::List(line, Vec::new()))?,
            Event::MappingStart(_, None) => self.begin(Open::Map(line, Vec::new(), None))?,
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::StreamEnd => return Ok(Progress::Done),
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
        }
        Ok(Progress::More)
    }

    fn count(&mut self) -> Result<(), String> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(format!("more than {MAX_NODES} values in one file"));
        }
        Ok(())
    }

    fn begin(&mut self, open: Open<'t>) -> Result<(), String> {
        self.count()?;
        if self.open.len() == MAX_DEPTH {
            return Err(too_deep());
        }
        self.open.push(open);
        Ok(())
    }

    fn end(&mut self) {
        match self.open.pop() {
            Some(Open::List(line, items)) => self.close(Node {
                line,
                content: Content::List(items),
            }),
            Some(Open::Map(line, pairs, _)) => self.close(Node {
                line,
                content: Content::Map(pairs),
            }),
            None => {}
        }
    }

    /// Puts a complete node where it belongs.
    fn close(&mut self, node: Node<'t>) {
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open::List(_, items)) => items.push(node),
            Some(Open::Map(_, pairs, pending)) => match pending.take() {
                None => *pending = Some(node),
                Some(key) => {
                    // A value that is not there has the place of the next thing; its key says more.
                    let line = if matches!(node.content, Content::Empty) {
                        key.line
                    } else {
                        node.line
                    };
                    pairs.push((key, Node { line, ..node }));
                }
            },
        }
    }
}

fn scalar(text: Cow<'_, str>, style: ScalarStyle) -> Content<'_> {
    match style {
        ScalarStyle::Plain if matches!(&*text, "" | "~" | "null" | "Null" | "NULL") => {
            Content::Empty
        }
        ScalarStyle::Plain => Content::Plain(text),
        ScalarStyle::SingleQuoted
        | ScalarStyle::DoubleQuoted
        | ScalarStyle::Literal
        | ScalarStyle::Folded => Content::Quoted(text),
    }
}

fn mistake(line: usize, message: String) -> Mistake {
    Mistake {
        path: String::new(),
        line: Some(line),
        message,
    }
}

fn not_yaml(error: &ScanError) -> Mistake {
    let (line, info) = (error.marker().line(), error.info());
    if info.contains("recursion limit") {
        return mistake(line, too_deep());
    }
    let hint = if info.contains("unknown anchor") {
        "; put a text that begins with * in quotes"
    } else {
        ""
    };
    mistake(line, format!("not YAML: {info}{hint}"))
}

fn too_deep() -> String {
    format!("nested deeper than the maximum of {MAX_DEPTH}")
}
