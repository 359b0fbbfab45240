//! Rules by the path of entries that leads to them.
//!
//! ```text
//! domain ── level ──┬─ "svc_pay"  rule, level ──┬─ "user"       rule
//!                   │                           └─ "user_root"  rule
//!                   ├─ "path_/api/*"  rule          (wildcards in the order of the file)
//!                   └─ "svc"        level ── …
//! ```
//!
//! A descriptor walks one level an entry: to the child whose name is the entry's key and value, joined with `_`; else to the
//! first wildcard that matches that; else to the child whose name is the key alone. A step is never taken back, and
//! only the rule at the very end applies.
//!
//! That names are joined is an oddity of envoyproxy/ratelimit on which files rely: a rule with the key `a_b` applies
//! to the entry `a` = `b`. Only matching knows it: whose count it is, is told by keys and values apart.

use std::{collections::HashMap, fmt::Write as _, sync::Arc};

use super::{Rule, wildcard::Wildcard};
use crate::envoy::overrides::Denied;

/// The rules of every domain.
#[derive(Debug, Default)]
pub(crate) struct Domains(HashMap<Box<str>, Domain>);

/// One domain.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) name: Arc<str>,
    /// Whether the descriptors of a request are charged together or not at all.
    pub(crate) charging: Charging,
    pub(crate) root: Level,
}

/// How the descriptors of one request are charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Charging {
    /// Each on its own, what is denied included.
    #[default]
    Each,
    /// All, or none.
    AllOrNothing,
}

/// The children of a node, or of a domain.
#[derive(Debug, Default)]
pub(crate) struct Level {
    children: HashMap<Box<str>, Node>,
    /// The names of the children with a `*`, in the order of the file.
    wildcards: Vec<(Wildcard, Box<str>)>,
}

/// A place in the tree.
#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) rule: Option<Arc<Rule>>,
    pub(crate) children: Level,
    /// The value as it was written, if one was.
    pub(crate) value: Option<Box<str>>,
    /// Whether all values that match count together.
    pub(crate) share_threshold: bool,
    /// Whether metrics show the request's value here.
    pub(crate) value_to_metric: bool,
}

/// What a descriptor came to: the nodes on its way, one an entry.
#[derive(Debug)]
pub(crate) struct Found<'d> {
    pub(crate) rule: &'d Arc<Rule>,
    pub(crate) path: Vec<&'d Node>,
}

impl Domains {
    pub(crate) fn get(&self, name: &str) -> Option<&Domain> {
        self.0.get(name)
    }

    pub(crate) fn entry(&mut self, name: &str) -> &mut Domain {
        self.0.entry(name.into()).or_insert_with(|| Domain {
            name: name.into(),
            charging: Charging::default(),
            root: Level::default(),
        })
    }

    /// Lets the limits of these rules take over what was spent under those of `old` at the same places.
    pub(crate) fn succeed(&mut self, old: &Self) {
        for (name, domain) in &mut self.0 {
            if let Some(old) = old.get(name) {
                domain.root.succeed(&old.root);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// How many descriptors there are, at every depth.
    pub(crate) fn descriptors(&self) -> usize {
        self.0
            .values()
            .map(|domain| domain.root.descriptors())
            .sum()
    }
}

impl Domain {
    /// What the windows of this domain do with what they deny.
    pub(crate) fn denied(&self) -> Denied {
        match self.charging {
            Charging::Each => Denied::InFull,
            Charging::AllOrNothing => Denied::Forgotten,
        }
    }

    /// The rule that applies to `entries`, if one does.
    pub(crate) fn find(&self, entries: &[(String, String)]) -> Option<Found<'_>> {
        let (mut level, mut path) = (&self.root, Vec::with_capacity(entries.len()));
        let mut joined = String::new();
        for (key, value) in entries {
            let node = level.child(key, value, &mut joined)?;
            path.push(node);
            level = &node.children;
        }
        let rule = path.last()?.rule.as_ref()?;
        Some(Found { rule, path })
    }
}

impl Node {
    /// The value that is counted where the request has `value`: the pattern, if all that match it count together.
    pub(crate) fn counted<'v>(&'v self, value: &'v str) -> &'v str {
        match &self.value {
            Some(pattern) if self.share_threshold => pattern,
            _ => value,
        }
    }
}

impl Level {
    fn child(&self, key: &str, value: &str, joined: &mut String) -> Option<&Node> {
        joined.clear();
        // Writing into a `String` cannot fail.
        let _ = write!(joined, "{key}_{value}");
        if let Some(node) = self.children.get(joined.as_str()) {
            return Some(node);
        }
        let matching = self
            .wildcards
            .iter()
            .find(|(wildcard, _)| wildcard.matches(joined));
        let name = matching.map_or(key, |(_, name)| name);
        self.children.get(name)
    }

    fn descriptors(&self) -> usize {
        let nodes = self.children.values();
        nodes.map(|node| 1 + node.children.descriptors()).sum()
    }

    fn succeed(&mut self, old: &Self) {
        for (name, node) in &mut self.children {
            let Some(old) = old.children.get(name) else {
                continue;
            };
            // Nobody else has a rule of a tree that is still being built.
            if let (Some(rule), Some(old)) = (node.rule.as_mut().and_then(Arc::get_mut), &old.rule)
            {
                rule.succeed(old);
            }
            node.children.succeed(&old.children);
        }
    }

    /// Adds a child; false, and nothing changes, if there is one of that name.
    pub(crate) fn add(&mut self, name: String, node: Node) -> bool {
        if self.children.contains_key(name.as_str()) {
            return false;
        }
        if let Some(wildcard) = Wildcard::parse(&name) {
            self.wildcards.push((wildcard, name.as_str().into()));
        }
        self.children.insert(name.into(), node);
        true
    }
}
