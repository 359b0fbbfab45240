//! The limits of overrides from which verdicts borrow.
//!
//! An override can be changed at any time, so the rules do not keep its limits. A verdict that
//! borrows from rules therefore needs another owner for them.

use std::sync::{Arc, OnceLock};

use tidegate_core::Limits;

/// A list of limits that only grows, so that verdicts can borrow from it. Overrides with the same
/// replacement share their limits, so the list has one item for each replacement that was used.
#[derive(Debug, Default)]
pub(crate) struct OverrideLimits(OnceLock<Box<Item>>);

#[derive(Debug)]
struct Item {
    limits: Arc<Limits>,
    next: OverrideLimits,
}

impl OverrideLimits {
    /// Returns `limits`, borrowed from this list. Adds them if the list does not contain them.
    pub(crate) fn keep(&self, limits: &Arc<Limits>) -> &Limits {
        let mut list = self;
        loop {
            let item = list.0.get_or_init(|| {
                Box::new(Item {
                    limits: Arc::clone(limits),
                    next: Self::default(),
                })
            });
            if Arc::ptr_eq(&item.limits, limits) {
                return &item.limits;
            }
            list = &item.next;
        }
    }
}

/// A copy of a list is empty, because no verdict borrows from it yet.
impl Clone for OverrideLimits {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Drop for OverrideLimits {
    fn drop(&mut self) {
        // Without this loop, the items would be dropped recursively, and the stack could overflow.
        let mut next = self.0.take();
        while let Some(mut item) = next {
            next = item.next.0.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::Limit;

    use super::*;

    #[test]
    fn a_list_keeps_each_limits_object_once() {
        let limits = |text: &str| Arc::new(Limits::from(text.parse::<Limit>().unwrap()));
        let (list, all) = (OverrideLimits::default(), ["1/s", "2/s"].map(limits));
        let kept = [0, 1, 0, 1].map(|at: usize| std::ptr::from_ref(list.keep(&all[at])));
        assert_eq!([kept[0], kept[1]], [kept[2], kept[3]]);
        assert_eq!(Arc::strong_count(&all[0]), 2);
        let copy = list.clone();
        drop(list);
        assert!(copy.0.get().is_none());
        assert_eq!(Arc::strong_count(&all[1]), 1);
    }

    #[test]
    fn a_long_list_can_be_dropped() {
        let list = OverrideLimits::default();
        let mut end = &list;
        for _ in 0..200_000 {
            end.keep(&Arc::new(Limits::from("1/s".parse::<Limit>().unwrap())));
            end = &end.0.get().unwrap().next;
        }
        drop(list);
    }
}
