//! State per host, so that one host is not affected by the failures of another.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// The most hosts with a state. A new host replaces the one that was least recently used.
pub(crate) const MAX_HOSTS: usize = 1_024;

/// One `T` per host, created when it is first used.
pub(crate) struct PerHost<T> {
    make: Box<dyn Fn() -> T + Send + Sync>,
    known: Mutex<Known<T>>,
}

struct Known<T> {
    hosts: HashMap<Box<str>, (u64, Arc<T>)>,
    /// Number of uses so far, to find the least recently used host.
    uses: u64,
}

impl<T> std::fmt::Debug for PerHost<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PerHost").finish_non_exhaustive()
    }
}

impl<T> PerHost<T> {
    pub(crate) fn new(make: impl Fn() -> T + Send + Sync + 'static) -> Self {
        let known = Known {
            hosts: HashMap::new(),
            uses: 0,
        };
        Self {
            make: Box::new(make),
            known: Mutex::new(known),
        }
    }

    /// Returns the state of `host`.
    pub(crate) fn of(&self, host: &str) -> Arc<T> {
        // No panic leaves the map inconsistent, so a poisoned lock is safe to use.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.uses += 1;
        let uses = known.uses;
        if let Some((used, found)) = known.hosts.get_mut(host) {
            *used = uses;
            return Arc::clone(found);
        }
        if known.hosts.len() >= MAX_HOSTS {
            known.forget_one();
        }
        let made = Arc::new((self.make)());
        known.hosts.insert(host.into(), (uses, Arc::clone(&made)));
        made
    }
}

impl<T> Known<T> {
    fn forget_one(&mut self) {
        let oldest = self.hosts.iter().min_by_key(|(_, (used, _))| *used);
        if let Some(host) = oldest.map(|(host, _)| host.clone()) {
            self.hosts.remove(&host);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_separate_and_bounded() {
        let hosts = PerHost::new(|| Mutex::new(0));
        *hosts.of("a").lock().unwrap() += 1;
        assert_eq!(*hosts.of("a").lock().unwrap(), 1);
        for number in 1..MAX_HOSTS {
            hosts.of(&number.to_string());
        }
        hosts.of("a");
        hosts.of("one too many");
        assert_eq!(*hosts.of("a").lock().unwrap(), 1, "used lately");
        assert_eq!(hosts.known.lock().unwrap().hosts.len(), MAX_HOSTS);
        assert!(!hosts.known.lock().unwrap().hosts.contains_key("1"));
    }
}
