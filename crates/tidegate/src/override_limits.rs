//! Storage for the limits of overrides. Verdicts borrow their limits from this storage.
//!
//! An override can be changed at any time, so the rules do not keep its limits. A verdict that
//! borrows from rules therefore needs another owner for the limits.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, OnceLock},
};

use tidegate_core::Limits;

/// The number of bits of a hash that select the child of a node.
const BITS: u32 = 2;

/// A set of limits that only grows, so that verdicts can borrow from it. Overrides with the same
/// replacement share their limits, so the set has one item for each replacement that was used, and
/// for each plan whose limits a factor has multiplied.
///
/// The set is a tree. The hash of an item's address determines the path from the root to the item,
/// so the number of steps to an item is logarithmic in the number of items.
#[derive(Debug, Default)]
pub(crate) struct OverrideLimits {
    hasher: RandomState,
    root: TreeSlot,
}

#[derive(Debug, Default)]
struct TreeSlot(OnceLock<Box<TreeNode>>);

#[derive(Debug)]
struct TreeNode {
    limits: Arc<Limits>,
    children: [TreeSlot; 1 << BITS],
}

impl OverrideLimits {
    /// Returns `limits`, borrowed from this set. Adds `limits` if the set does not contain them.
    pub(crate) fn keep(&self, limits: &Arc<Limits>) -> &Limits {
        let mut hash = self.hasher.hash_one(Arc::as_ptr(limits));
        let mut slot = &self.root;
        loop {
            let node = slot.0.get_or_init(|| {
                Box::new(TreeNode {
                    limits: Arc::clone(limits),
                    children: Default::default(),
                })
            });
            if Arc::ptr_eq(&node.limits, limits) {
                return &node.limits;
            }
            // Items with equal hashes are on the same path, which can have any length.
            hash = hash.rotate_right(BITS);
            slot = &node.children[(hash % (1 << BITS)) as usize];
        }
    }
}

/// A copy of a set is empty, because no verdict borrows from it yet.
impl Clone for OverrideLimits {
    fn clone(&self) -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::Limit;

    use super::*;

    fn limits(text: &str) -> Arc<Limits> {
        Arc::new(Limits::from(text.parse::<Limit>().unwrap()))
    }

    #[test]
    fn a_set_keeps_each_limits_object_once() {
        let (set, all) = (OverrideLimits::default(), ["1/s", "2/s"].map(limits));
        let kept = [0, 1, 0, 1].map(|at: usize| std::ptr::from_ref(set.keep(&all[at])));
        assert_eq!([kept[0], kept[1]], [kept[2], kept[3]]);
        assert_eq!(Arc::strong_count(&all[0]), 2);
        let copy = set.clone();
        drop(set);
        assert!(copy.root.0.get().is_none());
        assert_eq!(Arc::strong_count(&all[1]), 1);
    }

    #[test]
    fn a_large_set_is_shallow() {
        fn depth(slot: &TreeSlot) -> usize {
            let children = slot.0.get().map(|node| node.children.iter().map(depth));
            children.map_or(0, |depths| 1 + depths.max().unwrap())
        }
        let set = OverrideLimits::default();
        for _ in 0..100_000 {
            set.keep(&limits("1/s"));
        }
        // The logarithm of 100,000 to the base 4 is less than 9.
        assert!(depth(&set.root) < 30, "{}", depth(&set.root));
    }
}
