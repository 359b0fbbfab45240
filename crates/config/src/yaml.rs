//! A YAML parser that builds a tree of nodes with line numbers.
//!
//! The parser processes YAML events one by one. As soon as the tree exceeds its maximum size or
//! depth, the file is rejected. Rules files must not use aliases, because aliases could expand a
//! small file to a very large tree. The parser does not interpret scalars: the code that reads a
//! scalar determines whether it is a number or a string.
//!
//! The `saphyr-parser` crate parses the syntax. This module builds its own tree, so that all errors
//! in a file can be reported at once, each with its line. A serde deserialiser would stop at the
//! first error.

use std::{borrow::Cow, collections::HashMap};

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError};

use super::Mistake;

/// The maximum nesting depth of lists and maps.
const MAX_DEPTH: usize = 64;

/// The maximum number of scalars, lists and maps in one file.
const MAX_NODES: usize = 4_000_000;

/// How strictly a file is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum YamlDialect {
    /// The dialect of rules files allows one document, no aliases, and no repeated keys.
    Strict,
    /// The dialect of files that were written for a permissive YAML 1.1 reader. If a file has
    /// several documents, the first document is used. If a key is repeated, its last value is used.
    /// Aliases and merge keys (`<<`) are expanded.
    Lenient,
}

/// A parsed file, with warnings about content that the lenient dialect may interpret in a way that
/// its author does not expect.
#[derive(Debug)]
pub struct YamlDocument<'t> {
    /// The value of the whole document.
    pub root: YamlNode<'t>,
    /// The warnings about unexpected interpretations. The strict dialect has no warnings.
    pub warnings: Vec<Mistake>,
}

/// A value in the file, with its line.
#[derive(Clone, Debug)]
pub struct YamlNode<'t> {
    /// The line of the value, counted from 1.
    pub line: usize,
    /// The content of the value.
    pub content: YamlContent<'t>,
}

/// The content of a value.
#[derive(Clone, Debug)]
pub enum YamlContent<'t> {
    /// The value is missing: `~`, `null`, or nothing at all.
    Empty,
    /// An unquoted scalar.
    Plain(Cow<'t, str>),
    /// A quoted scalar, or a block scalar.
    Quoted(Cow<'t, str>),
    /// A list.
    List(Vec<YamlNode<'t>>),
    /// A map: its keys and values in the order of the file, including repeated keys.
    Map(Vec<(YamlNode<'t>, YamlNode<'t>)>),
}

/// A list or a map whose end has not been parsed yet. The last field of a map is a key whose value
/// has not been parsed yet, if there is one.
enum Open<'t> {
    List(Position, Vec<YamlNode<'t>>),
    Map(
        Position,
        Vec<(YamlNode<'t>, YamlNode<'t>)>,
        Option<YamlNode<'t>>,
    ),
}

/// The line of a node, and its anchor ID. The ID 0 means that the node has no anchor.
#[derive(Clone, Copy)]
struct Position {
    line: usize,
    anchor: usize,
}

/// Parses the single document in `text`. An empty string is parsed as [`YamlContent::Empty`].
///
/// # Errors
///
/// Returns the first error if the text is not YAML, exceeds a maximum, or uses a feature that
/// `dialect` does not allow.
pub fn parse(text: &str, dialect: YamlDialect) -> Result<YamlDocument<'_>, Mistake> {
    let mut tree = Tree::new(dialect);
    let mut parser = Parser::new_from_str(text);
    while let Some(event) = parser.next_event() {
        let (event, span) = event.map_err(|error| not_yaml(&error))?;
        let line = span.start.line();
        if tree
            .take(event, line)
            .map_err(|message| mistake(line, message))?
            == ParseStatus::Done
        {
            break;
        }
    }
    let empty = YamlNode {
        line: 1,
        content: YamlContent::Empty,
    };
    Ok(YamlDocument {
        root: tree.root.unwrap_or(empty),
        warnings: tree.warnings,
    })
}

struct Tree<'t> {
    dialect: YamlDialect,
    root: Option<YamlNode<'t>>,
    open: Vec<Open<'t>>,
    nodes: usize,
    /// The nodes with anchors, by anchor ID.
    anchored: HashMap<usize, YamlNode<'t>>,
    warnings: Vec<Mistake>,
}

#[derive(PartialEq, Eq)]
enum ParseStatus {
    More,
    Done,
}

impl<'t> Tree<'t> {
    fn new(dialect: YamlDialect) -> Self {
        Self {
            dialect,
            root: None,
            open: Vec::new(),
            nodes: 0,
            anchored: HashMap::new(),
            warnings: Vec::new(),
        }
    }

    fn take(&mut self, event: Event<'t>, line: usize) -> Result<ParseStatus, String> {
        match event {
            Event::Scalar(_, _, _, Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => {
                return Err("tags such as !!str are not supported; remove the tag".into());
            }
            Event::Alias(anchor) if self.dialect == YamlDialect::Lenient => self.expand(anchor)?,
            Event::Alias(_) => {
                return Err("aliases are not supported; write out the value".into());
            }
            Event::DocumentStart(_) if self.root.is_some() => {
                return Err(
                    "a second YAML document begins here; a rules file must be a single document"
                        .into(),
                );
            }
            Event::Scalar(text, style, anchor, None) => {
                self.count(1)?;
                let content = scalar(text, style);
                self.close(Position { line, anchor }, content)?;
            }
            Event::SequenceStart(anchor, None) => {
                self.begin(Open::List(Position { line, anchor }, Vec::new()))?;
            }
            Event::MappingStart(anchor, None) => {
                self.begin(Open::Map(Position { line, anchor }, Vec::new(), None))?;
            }
            Event::DocumentEnd if self.dialect == YamlDialect::Lenient => {
                return Ok(ParseStatus::Done);
            }
            Event::SequenceEnd | Event::MappingEnd => self.end()?,
            Event::StreamEnd => return Ok(ParseStatus::Done),
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
        }
        Ok(ParseStatus::More)
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
            Some(Open::List(position, items)) => self.close(position, YamlContent::List(items)),
            Some(Open::Map(position, pairs, _)) => {
                let pairs = match self.dialect {
                    YamlDialect::Strict => pairs,
                    YamlDialect::Lenient => self.merged(pairs),
                };
                self.close(position, YamlContent::Map(pairs))
            }
            None => Ok(()),
        }
    }

    /// Creates a node from its complete content, and adds the node to its parent.
    fn close(&mut self, position: Position, content: YamlContent<'t>) -> Result<(), String> {
        let node = YamlNode {
            line: position.line,
            content,
        };
        if position.anchor != 0 && self.dialect == YamlDialect::Lenient {
            // Keep a copy of the anchored node, so that later aliases can be expanded.
            self.count(node.count())?;
            self.anchored.insert(position.anchor, node.clone());
        }
        self.put(node);
        Ok(())
    }

    fn put(&mut self, node: YamlNode<'t>) {
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open::List(_, items)) => items.push(node),
            Some(Open::Map(_, pairs, pending)) => match pending.take() {
                None => *pending = Some(node),
                Some(key) => {
                    // For an absent value, the parser reports the line of the next token. For a
                    // missing value, use the line of the key, which is more helpful in messages.
                    let line = if matches!(node.content, YamlContent::Empty) {
                        key.line
                    } else {
                        node.line
                    };
                    pairs.push((key, YamlNode { line, ..node }));
                }
            },
        }
    }
}

/// The operations that only the lenient dialect needs.
impl<'t> Tree<'t> {
    /// Inserts a copy of the node with the anchor ID `anchor` in place of an alias.
    fn expand(&mut self, anchor: usize) -> Result<(), String> {
        let anchored = self.anchored.get(&anchor);
        let size = anchored.map(|node| (node.count(), node.depth()));
        let (nodes, depth) = size.ok_or("an alias refers to a value that contains the alias")?;
        self.count(nodes)?;
        if self.open.len() + depth > MAX_DEPTH {
            return Err(too_deep());
        }
        if let Some(node) = self.anchored.get(&anchor).cloned() {
            self.put(node);
        }
        Ok(())
    }

    /// Returns `pairs` with merge keys (`<<`) expanded. A repeated key has the position of its
    /// first occurrence and the value of its last occurrence.
    fn merged(
        &mut self,
        pairs: Vec<(YamlNode<'t>, YamlNode<'t>)>,
    ) -> Vec<(YamlNode<'t>, YamlNode<'t>)> {
        let mut own: Vec<(YamlNode<'t>, YamlNode<'t>)> = Vec::with_capacity(pairs.len());
        let mut merges = Vec::new();
        let mut positions: HashMap<String, usize> = HashMap::new();
        for (key, value) in pairs {
            let name = key.text().map(str::to_owned);
            match (name, &key.content) {
                (_, YamlContent::Plain(name)) if name == "<<" => merges.push(value),
                (Some(name), _) => match positions.get(&name) {
                    Some(position) => {
                        let message =
                            format!("duplicate key `{name}` in one map; the last value is used");
                        self.warnings.push(mistake(key.line, message));
                        own[*position].1 = value;
                    }
                    None => {
                        positions.insert(name, own.len());
                        own.push((key, value));
                    }
                },
                (None, _) => own.push((key, value)),
            }
        }
        for (key, value) in merges.into_iter().flat_map(YamlNode::into_merged) {
            let name = key.text().map(str::to_owned);
            if name.is_some_and(|name| positions.insert(name, own.len()).is_none()) {
                own.push((key, value));
            }
        }
        own
    }
}

impl YamlNode<'_> {
    /// Returns the string in the node, if the node is a scalar.
    fn text(&self) -> Option<&str> {
        match &self.content {
            YamlContent::Plain(text) | YamlContent::Quoted(text) => Some(text),
            YamlContent::Empty | YamlContent::List(_) | YamlContent::Map(_) => None,
        }
    }

    /// Returns the number of nodes in this subtree, including this node.
    fn count(&self) -> usize {
        let inside: usize = self.children().map(Self::count).sum();
        1 + inside
    }

    /// Returns the nesting depth of the lists and maps in this subtree.
    fn depth(&self) -> usize {
        self.children()
            .map(|child| 1 + child.depth())
            .max()
            .unwrap_or(0)
    }

    fn children(&self) -> Box<dyn Iterator<Item = &Self> + '_> {
        match &self.content {
            YamlContent::List(items) => Box::new(items.iter()),
            YamlContent::Map(pairs) => Box::new(pairs.iter().flat_map(|(key, value)| [key, value])),
            YamlContent::Empty | YamlContent::Plain(_) | YamlContent::Quoted(_) => {
                Box::new(std::iter::empty())
            }
        }
    }

    /// Returns the pairs that a merge key with this node as its value adds. For a map, the result
    /// is its pairs. For a list of maps, the result is the pairs of all maps in the list.
    fn into_merged(self) -> Vec<(Self, Self)> {
        match self.content {
            YamlContent::Map(pairs) => pairs,
            YamlContent::List(items) => items.into_iter().flat_map(Self::into_merged).collect(),
            YamlContent::Empty | YamlContent::Plain(_) | YamlContent::Quoted(_) => Vec::new(),
        }
    }
}

fn scalar(text: Cow<'_, str>, style: ScalarStyle) -> YamlContent<'_> {
    match style {
        ScalarStyle::Plain if matches!(&*text, "" | "~" | "null" | "Null" | "NULL") => {
            YamlContent::Empty
        }
        ScalarStyle::Plain => YamlContent::Plain(text),
        ScalarStyle::SingleQuoted
        | ScalarStyle::DoubleQuoted
        | ScalarStyle::Literal
        | ScalarStyle::Folded => YamlContent::Quoted(text),
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
        "; quote a string that begins with *"
    } else if info.contains("tabs disallowed") {
        "; indent with spaces"
    } else {
        ""
    };
    mistake(line, format!("invalid YAML: {info}{hint}"))
}

fn too_deep() -> String {
    format!("values are nested deeper than the maximum of {MAX_DEPTH}")
}
