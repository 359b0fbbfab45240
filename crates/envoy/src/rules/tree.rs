//! The tree of rules, indexed by the entries of a descriptor.
//!
//! ```text
//! domain ── level ──┬─ "svc_pay"  rule, level ──┬─ "user"       rule
//!                   │                           └─ "user_root"  rule
//!                   ├─ "path_/api/*"  rule          (wildcards in file order)
//!                   └─ "svc"        level ── …
//! ```
//!
//! A descriptor descends one level per entry. The name of an entry is its key and value, joined
//! with `_`. The next node is the child with this name. If no child has this name, the next node is
//! the first wildcard child that matches the name. If no wildcard child matches either, the next
//! node is the child whose name is the key alone. There is no backtracking. Only the rule at the
//! final node applies.
//!
//! The joined names are a peculiarity of envoyproxy/ratelimit, and existing files depend on them.
//! For example, a rule with the key `a_b` applies to the entry `a` = `b`. Joined names are used
//! only for matching: in counter keys, keys and values stay separate.

use std::{collections::HashMap, fmt::Write as _, sync::Arc};

use tidegate_core::Overrides;

use super::{DescriptorRule, limitador::LimitadorLimit, wildcard::Wildcard};

/// The rules of all domains in the configuration.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    by_name: HashMap<Box<str>, Domain>,
    /// The overrides that operators set while the server runs.
    pub(super) overrides: Overrides,
}

/// The rules of one domain.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) name: Arc<str>,
    /// How the descriptors of a request are charged: each separately, or all or none.
    pub(crate) charging: ChargeMode,
    pub(crate) root: RuleChildren,
    /// The limits of a Limitador limits file. A domain has either limits from a Limitador limits
    /// file or a rule tree.
    pub(crate) limitador: Vec<LimitadorLimit>,
}

/// How the descriptors of one request are charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ChargeMode {
    /// Each descriptor is charged separately, and denied hits are counted.
    #[default]
    Each,
    /// Either all descriptors are charged, or none of them.
    AllOrNothing,
}

/// How a window counts denied hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DeniedHits {
    /// Denied hits are counted in full.
    InFull,
    /// Denied hits are not counted.
    NotCounted,
}

/// The children of a node or of a domain in the rule tree.
#[derive(Debug, Default)]
pub(crate) struct RuleChildren {
    children: HashMap<Box<str>, RuleNode>,
    /// The names of the children that contain `*`, in file order.
    wildcards: Vec<(Wildcard, Box<str>)>,
}

/// A node of the rule tree.
#[derive(Debug, Default)]
pub(crate) struct RuleNode {
    pub(crate) rule: Option<Arc<DescriptorRule>>,
    pub(crate) children: RuleChildren,
    /// The value in the configuration file, if there is one.
    pub(crate) value: Option<Box<str>>,
    /// Whether all matching values share one counter.
    pub(crate) share_threshold: bool,
    /// Whether metrics contain the value from the request.
    pub(crate) value_to_metric: bool,
}

/// The rule for a descriptor, and the nodes on the path to the rule, one per entry.
#[derive(Debug)]
pub(crate) struct MatchedRule<'d> {
    pub(crate) rule: &'d Arc<DescriptorRule>,
    pub(crate) path: Vec<&'d RuleNode>,
}

impl Domains {
    pub(crate) fn get(&self, name: &str) -> Option<&Domain> {
        self.by_name.get(name)
    }

    pub(crate) fn entry(&mut self, name: &str) -> &mut Domain {
        self.by_name.entry(name.into()).or_insert_with(|| Domain {
            name: name.into(),
            charging: ChargeMode::default(),
            root: RuleChildren::default(),
            limitador: Vec::new(),
        })
    }

    /// Applies `overrides` to the rules. Later changes to `overrides` take effect immediately.
    pub(crate) fn set_overrides(&mut self, overrides: &Overrides) {
        self.overrides = overrides.clone();
    }

    /// Carries over the usage that was counted under the limits of `old`. A rule takes over the
    /// usage of the old rule with the same path.
    pub(crate) fn inherit_counts(&mut self, old: &Self) {
        for (name, domain) in &mut self.by_name {
            if let Some(old) = old.get(name) {
                domain.root.inherit_counts(&old.root);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Returns the number of descriptors at all depths.
    pub(crate) fn descriptors(&self) -> usize {
        self.by_name
            .values()
            .map(|domain| domain.root.descriptors() + domain.limitador.len())
            .sum()
    }
}

impl Domain {
    /// Returns how the windows of this domain count denied hits.
    pub(crate) fn denied_hits(&self) -> DeniedHits {
        match self.charging {
            ChargeMode::Each => DeniedHits::InFull,
            ChargeMode::AllOrNothing => DeniedHits::NotCounted,
        }
    }

    /// Returns the rule that applies to `entries`, if any.
    pub(crate) fn find(&self, entries: &[(String, String)]) -> Option<MatchedRule<'_>> {
        let (mut level, mut path) = (&self.root, Vec::with_capacity(entries.len()));
        let mut joined = String::new();
        for (key, value) in entries {
            let node = level.child(key, value, &mut joined)?;
            path.push(node);
            level = &node.children;
        }
        let rule = path.last()?.rule.as_ref()?;
        Some(MatchedRule { rule, path })
    }
}

impl RuleNode {
    /// Returns the value for the counter key. If all matching values share one counter, the result
    /// is the pattern. If each value has its own counter, the result is `value` itself.
    pub(crate) fn counted<'v>(&'v self, value: &'v str) -> &'v str {
        match &self.value {
            Some(pattern) if self.share_threshold => pattern,
            _ => value,
        }
    }
}

impl RuleChildren {
    fn child(&self, key: &str, value: &str, joined: &mut String) -> Option<&RuleNode> {
        self.named_child(key, value, joined).map(|(_, node)| node)
    }

    /// Returns the child for an entry, with its name.
    pub(super) fn named_child(
        &self,
        key: &str,
        value: &str,
        joined: &mut String,
    ) -> Option<(&str, &RuleNode)> {
        joined.clear();
        // Writing into a `String` cannot fail.
        let _ = write!(joined, "{key}_{value}");
        if let Some(named) = self.named(joined) {
            return Some(named);
        }
        let matching = self
            .wildcards
            .iter()
            .find(|(wildcard, _)| wildcard.matches(joined));
        self.named(matching.map_or(key, |(_, name)| name))
    }

    /// Returns the child with this name.
    pub(super) fn named(&self, name: &str) -> Option<(&str, &RuleNode)> {
        let (name, node) = self.children.get_key_value(name)?;
        Some((name, node))
    }

    fn descriptors(&self) -> usize {
        let nodes = self.children.values();
        nodes.map(|node| 1 + node.children.descriptors()).sum()
    }

    fn inherit_counts(&mut self, old: &Self) {
        for (name, node) in &mut self.children {
            let Some(old) = old.children.get(name) else {
                continue;
            };
            // `get_mut` cannot fail, because the rules have no other owners before the tree is
            // complete.
            if let (Some(rule), Some(old)) = (node.rule.as_mut().and_then(Arc::get_mut), &old.rule)
            {
                rule.inherit_counts(old);
            }
            node.children.inherit_counts(&old.children);
        }
    }

    /// Adds a child. If the name already exists, changes nothing and returns false.
    pub(crate) fn add(&mut self, name: String, node: RuleNode) -> bool {
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
