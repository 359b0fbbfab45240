//! YAML as a tree of nodes that know their lines.
//!
//! The parser's events are taken one by one, so that every bound holds before anything is built that
//! could exceed it. In a rules file aliases are refused: what they stand for could be written out, and then it is bounded.
//! Whether a scalar is a number or a text is for its reader to say.

use std::{borrow::Cow, collections::HashMap};

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError};

use super::Mistake;

/// The deepest nesting of lists and maps.
const MAX_DEPTH: usize = 64;

/// The most scalars, lists and maps in one file.
const MAX_NODES: usize = 4_000_000;

/// How strictly a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// A rules file: one document, without aliases, and no key twice.
    Strict,
    /// A file that was written for a reader of YAML 1.1 that takes all it can: of several documents the first, of a
    /// repeated key the last; aliases and merges (`<<`) are expanded.
    Lenient,
}

/// A file as a tree, and what a lenient reader made of it that its author may not expect.
#[derive(Debug)]
pub(crate) struct Document<'t> {
    pub(crate) root: Node<'t>,
    pub(crate) warnings: Vec<Mistake>,
}

/// A value in the file, and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Node<'t> {
    /// The line, from 1.
    pub(crate) line: usize,
    pub(crate) content: Content<'t>,
}

#[derive(Clone, Debug)]
pub(crate) enum Content<'t> {
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

/// A list or a map whose end has not come yet, and its anchor.
enum Open<'t> {
    List(Place, Vec<Node<'t>>),
    Map(Place, Vec<(Node<'t>, Node<'t>)>, Option<Node<'t>>),
}

/// The line of a node, and the number of its anchor; 0 is none.
#[derive(Clone, Copy)]
struct Place {
    line: usize,
    anchor: usize,
}

/// Reads the one document in `text`; nothing at all is [`Content::Empty`].
pub(crate) fn parse(text: &str, dialect: Dialect) -> Result<Document<'_>, Mistake> {
    let mut tree = Tree::new(dialect);
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
    let empty = Node {
        line: 1,
        content: Content::Empty,
    };
    Ok(Document {
        root: tree.root.unwrap_or(empty),
        warnings: tree.warnings,
    })
}

struct Tree<'t> {
    dialect: Dialect,
    root: Option<Node<'t>>,
    open: Vec<Open<'t>>,
    nodes: usize,
    /// The nodes with anchors, by their numbers.
    anchored: HashMap<usize, Node<'t>>,
    warnings: Vec<Mistake>,
}

#[derive(PartialEq, Eq)]
enum Progress {
    More,
    Done,
}

impl<'t> Tree<'t> {
    fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            root: None,
            open: Vec::new(),
            nodes: 0,
            anchored: HashMap::new(),
            warnings: Vec::new(),
        }
    }

    fn take(&mut self, event: Event<'t>, line: usize) -> Result<Progress, String> {
        match event {
            Event::Scalar(_, _, _, Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => {
                return Err("tags such as !!str are not taken; remove it".into());
            }
            Event::Alias(anchor) if self.dialect == Dialect::Lenient => self.expand(anchor)?,
            Event::Alias(_) => {
                return Err("aliases are not taken; write out what it stands for".into());
            }
            Event::DocumentStart(_) if self.root.is_some() => {
                return Err("a second document begins here; a rules file is one document".into());
            }
            Event::Scalar(text, style, anchor, None) => {
                self.count(1)?;
                let content = scalar(text, style);
                self.close(Place { line, anchor }, content)?;
            }
            Event::SequenceStart(anchor, None) => {
                self.begin(Open::List(Place { line, anchor }, Vec::new()))?;
            }
            Event::MappingStart(anchor, None) => {
                self.begin(Open::Map(Place { line, anchor }, Vec::new(), None))?;
            }
            Event::DocumentEnd if self.dialect == Dialect::Lenient => return Ok(Progress::Done),
            Event::SequenceEnd | Event::MappingEnd => self.end()?,
            Event::StreamEnd => return Ok(Progress::Done),
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
        }
        Ok(Progress::More)
    }

    fn count(&mut self, nodes: usize) -> Result<(), String> {
        self.nodes += nodes;
        if self.nodes > MAX_NODES {
            return Err(format!("more than {MAX_NODES} values in one file"));
        }
        Ok(())
    }

    fn begin(&mut self, open: Open<'t>) -> Result<(), String> {
        self.count(1)?;
        if self.open.len() == MAX_DEPTH {
            return Err(too_deep());
        }
        self.open.push(open);
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        match self.open.pop() {
            Some(Open::List(place, items)) => self.close(place, Content::List(items)),
            Some(Open::Map(place, pairs, _)) => {
                let pairs = match self.dialect {
                    Dialect::Strict => pairs,
                    Dialect::Lenient => self.merged(pairs),
                };
                self.close(place, Content::Map(pairs))
            }
            None => Ok(()),
        }
    }

    /// Puts a complete node where it belongs.
    fn close(&mut self, place: Place, content: Content<'t>) -> Result<(), String> {
        let node = Node {
            line: place.line,
            content,
        };
        if place.anchor != 0 && self.dialect == Dialect::Lenient {
            // A copy is kept for the aliases to come.
            self.count(node.count())?;
            self.anchored.insert(place.anchor, node.clone());
        }
        self.put(node);
        Ok(())
    }

    fn put(&mut self, node: Node<'t>) {
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

/// What only a lenient reader does.
impl<'t> Tree<'t> {
    /// Puts a copy of what an alias stands for where the alias is.
    fn expand(&mut self, anchor: usize) -> Result<(), String> {
        let anchored = self.anchored.get(&anchor);
        let size = anchored.map(|node| (node.count(), node.depth()));
        let (nodes, depth) = size.ok_or("an alias stands for something that contains it")?;
        self.count(nodes)?;
        if self.open.len() + depth > MAX_DEPTH {
            return Err(too_deep());
        }
        if let Some(node) = self.anchored.get(&anchor).cloned() {
            self.put(node);
        }
        Ok(())
    }

    /// The pairs with merges expanded; of a repeated key the last, at the place of the first.
    fn merged(&mut self, pairs: Vec<(Node<'t>, Node<'t>)>) -> Vec<(Node<'t>, Node<'t>)> {
        let mut own: Vec<(Node<'t>, Node<'t>)> = Vec::with_capacity(pairs.len());
        let mut merges = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for (key, value) in pairs {
            let name = key.text().map(str::to_owned);
            match (name, &key.content) {
                (_, Content::Plain(name)) if name == "<<" => merges.push(value),
                (Some(name), _) => match places.get(&name) {
                    Some(place) => {
                        let message =
                            format!("key `{name}` stands twice in one map; the last one holds");
                        self.warnings.push(mistake(key.line, message));
                        own[*place].1 = value;
                    }
                    None => {
                        places.insert(name, own.len());
                        own.push((key, value));
                    }
                },
                (None, _) => own.push((key, value)),
            }
        }
        for (key, value) in merges.into_iter().flat_map(Node::into_merged) {
            let name = key.text().map(str::to_owned);
            if name.is_some_and(|name| places.insert(name, own.len()).is_none()) {
                own.push((key, value));
            }
        }
        own
    }
}

impl Node<'_> {
    /// The text, if it is a scalar.
    fn text(&self) -> Option<&str> {
        match &self.content {
            Content::Plain(text) | Content::Quoted(text) => Some(text),
            Content::Empty | Content::List(_) | Content::Map(_) => None,
        }
    }

    /// How many nodes it is.
    fn count(&self) -> usize {
        let inside: usize = self.children().map(Self::count).sum();
        1 + inside
    }

    /// How many lists and maps are in each other.
    fn depth(&self) -> usize {
        self.children()
            .map(|child| 1 + child.depth())
            .max()
            .unwrap_or(0)
    }

    fn children(&self) -> Box<dyn Iterator<Item = &Self> + '_> {
        match &self.content {
            Content::List(items) => Box::new(items.iter()),
            Content::Map(pairs) => Box::new(pairs.iter().flat_map(|(key, value)| [key, value])),
            Content::Empty | Content::Plain(_) | Content::Quoted(_) => Box::new(std::iter::empty()),
        }
    }

    /// The pairs that a merge of this brings: those of a map, or of each map of a list.
    fn into_merged(self) -> Vec<(Self, Self)> {
        match self.content {
            Content::Map(pairs) => pairs,
            Content::List(items) => items.into_iter().flat_map(Self::into_merged).collect(),
            Content::Empty | Content::Plain(_) | Content::Quoted(_) => Vec::new(),
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
