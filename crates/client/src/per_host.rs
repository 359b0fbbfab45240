//! A table with separate state for each host, so that the failures of one host do not affect
//! another host.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use crate::sync::lock;

/// The maximum number of hosts in the table. When the table is full, a new host replaces the least
/// recently used host.
pub(crate) const MAX_HOSTS: usize = 1_024;

/// A table with one `T` per host. The `T` of a host is created when the host is first used.
pub(crate) struct PerHost<T> {
    make: Box<dyn Fn() -> T + Send + Sync>,
    table: Mutex<HostTable<T>>,
}

struct HostTable<T> {
    hosts: HashMap<Box<str>, HostEntry<T>>,
    /// The number of lookups and insertions so far. The number serves as a clock for finding the
    /// least recently used host.
    uses: u64,
}

struct HostEntry<T> {
    /// The value of [`HostTable::uses`] at the last use of this host.
    last_use: u64,
    state: Arc<T>,
}

impl<T> std::fmt::Debug for PerHost<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PerHost").finish_non_exhaustive()
    }
}

impl<T> PerHost<T> {
    pub(crate) fn new(make: impl Fn() -> T + Send + Sync + 'static) -> Self {
        let table = HostTable {
            hosts: HashMap::new(),
            uses: 0,
        };
        Self {
            make: Box::new(make),
            table: Mutex::new(table),
        }
    }

    /// Returns the state of `host`, creating the state if the host is not in the table.
    pub(crate) fn get(&self, host: &str) -> Arc<T> {
        let mut table = lock(&self.table);
        table.get(host).unwrap_or_else(|| {
            let state = Arc::new((self.make)());
            table.insert(host, Arc::clone(&state));
            state
        })
    }
}

impl<T> HostTable<T> {
    fn get(&mut self, host: &str) -> Option<Arc<T>> {
        self.uses += 1;
        let entry = self.hosts.get_mut(host)?;
        entry.last_use = self.uses;
        Some(Arc::clone(&entry.state))
    }

    fn insert(&mut self, host: &str, state: Arc<T>) {
        if self.hosts.len() >= MAX_HOSTS {
            self.evict_oldest();
        }
        let last_use = self.uses;
        self.hosts
            .insert(host.into(), HostEntry { last_use, state });
        debug_assert!(self.hosts.len() <= MAX_HOSTS);
    }

    fn evict_oldest(&mut self) {
        let oldest = self.hosts.iter().min_by_key(|(_, entry)| entry.last_use);
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
        *hosts.get("a").lock().unwrap() += 1;
        assert_eq!(*hosts.get("a").lock().unwrap(), 1);
        for number in 1..MAX_HOSTS {
            hosts.get(&number.to_string());
        }
        hosts.get("a");
        hosts.get("one too many");
        assert_eq!(*hosts.get("a").lock().unwrap(), 1, "used lately");
        assert_eq!(hosts.table.lock().unwrap().hosts.len(), MAX_HOSTS);
        assert!(!hosts.table.lock().unwrap().hosts.contains_key("1"));
    }
}
