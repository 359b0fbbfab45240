//! Top talkers (the keys with the most traffic) across all servers that share a Redis.
//!
//! Each server publishes its time slices when they are complete. If counts from a delayed worker or
//! from a later minute are added to a slice, the slice is published again. Any server can read the
//! slices of all other servers, and merge these slices with its own slices. The counts of other
//! servers are therefore up to one time slice old. A killed server loses at most the current
//! minute.

use std::collections::BTreeMap;

use tidegate_core::{
    Rule, RuleSet, Timestamp, free_key_in, free_key_parts,
    top::{ClosedSlice, GroupSummaries, Level, Period, Summary, SummaryEntry, minute_of},
};
use tidegate_redis::{PublishedSlice, RedisStore, StoreError};

use super::{TopQuery, TopTalkers, listed_rule};
use crate::KeyMask;

/// The maximum size of the summaries of a published slice, in bytes. A larger slice is published
/// with fewer keys.
const MAX_SLICE_BYTES: usize = 256 << 10;

/// The maximum number of slices that one command reads. The number is small, because decisions in
/// the same Redis batch wait for the reply.
const SLICES_PER_READ: usize = 4;

/// The length of the scope at the start of a rule's key.
const SCOPE_BYTES: usize = 8;

/// The counts of the other servers that share the Redis.
#[derive(Debug, Default)]
pub struct OtherServers {
    /// The merged slices of each server that decided requests in the period.
    pub(super) slices: Vec<ClosedSlice>,
    /// Why some servers may be missing; `None` if all servers were read.
    pub(super) problem: Option<String>,
}

impl OtherServers {
    /// Returns the result to use if the other servers' slices cannot be read.
    #[must_use]
    pub fn unknown(problem: String) -> Self {
        Self {
            slices: Vec::new(),
            problem: Some(problem),
        }
    }
}

impl TopTalkers {
    /// Publishes the slices that have changed since the last publication in `store`, with one
    /// command per slice. Stops at the first failure. Has no effect while another publication is in
    /// progress.
    pub(crate) async fn publish(&self, store: &RedisStore, rules: &RuleSet, mask: &KeyMask) {
        let publisher = &self.publisher;
        let Some(_publication) = publisher.begin() else {
            return;
        };
        let mut published = None;
        loop {
            // Remove the slice from the set first. If the slice changes during the publication, it
            // is then added to the set again.
            let Some((level, number)) = self.closed().unpublished.pop_first() else {
                break;
            };
            let Some(slice) = self.packed(level, number, rules, mask) else {
                continue;
            };
            let result = store.publish_slice(publisher.id(), slice).await;
            let has_failed = result.is_err();
            published = Some(result);
            if has_failed {
                self.closed().unpublished.insert((level, number));
                break;
            }
        }
        if let Some(published) = published {
            publisher.record(&published);
        }
    }

    /// Returns the slice in its published form; `None` if the slice no longer exists.
    fn packed(
        &self,
        level: Level,
        number: u64,
        rules: &RuleSet,
        mask: &KeyMask,
    ) -> Option<PublishedSlice> {
        // The lock is released before the slice is packed.
        let slice = self.closed().history.slice(level, number).cloned();
        let mut slice = slice?;
        if mask.is_hashed() {
            let groups = slice.groups.iter().map(|(scope, group)| {
                let rule = listed_rule(rules, *scope);
                (*scope, hashed(group, rule, mask))
            });
            slice.groups = groups.collect();
        }
        slice.bound(MAX_SLICE_BYTES);
        Some((field(level, number), slice.pack(number)))
    }

    /// Reads the slices that the other servers have published in `store`.
    pub(crate) async fn of_other_servers(
        &self,
        store: &RedisStore,
        rules: &RuleSet,
        query: &TopQuery,
        now: Timestamp,
    ) -> OtherServers {
        let wanted = query
            .rule
            .as_ref()
            .map(|name| rules.rule(name).map(Rule::key_scope));
        let mut servers = BTreeMap::<String, ClosedSlice>::new();
        let read = self.read_published(store, query.over, now, |server, _, mut slice| {
            if let Some(wanted) = wanted {
                slice.groups.retain(|scope, _| Some(*scope) == wanted);
            }
            let merged = servers.entry(server.to_owned()).or_default();
            merged.merge(&slice, self.keys);
        });
        if let Err(error) = read.await {
            return OtherServers::unknown(error.to_string());
        }
        // After a restart, the server's previous ID stays listed for a day, often without requests
        // in the period.
        let slices = servers.into_values();
        OtherServers {
            slices: slices.filter(|slice| slice.total.requests > 0).collect(),
            problem: None,
        }
    }

    /// Reads the other servers' published slices of the period `over`, which ends at `now`. Passes
    /// each slice to `take`, with the ID of its server and the slice number.
    pub(super) async fn read_published(
        &self,
        store: &RedisStore,
        over: Period,
        now: Timestamp,
        mut take: impl FnMut(&str, u64, ClosedSlice),
    ) -> Result<(), StoreError> {
        let (minute, level) = (minute_of(now), over.level());
        let first = over.first_slice(minute);
        let numbers = first..=minute / level.minutes();
        let fields: Vec<String> = numbers.map(|number| field(level, number)).collect();
        for server in store.publishing_servers().await? {
            if server == self.publisher.id() {
                continue;
            }
            for fields in fields.chunks(SLICES_PER_READ) {
                for packed in store.published_slices(&server, fields).await? {
                    // The field names repeat, so the field may still contain an older slice.
                    if let Some((number, slice)) = ClosedSlice::unpack(&packed)
                        && number >= first
                    {
                        take(&server, number, slice);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the name of a slice's field in Redis. The names repeat every [`Level::slices`] slices,
/// so that newer slices overwrite older ones.
fn field(level: Level, number: u64) -> String {
    let prefix = match level {
        Level::Minutes => 'm',
        Level::FiveMinutes => 'f',
        Level::Hours => 'h',
    };
    format!("{prefix}{}", number % level.slices())
}

/// Returns the counts with the values in their keys hashed. `rule` is `None` for limits sent with
/// requests.
pub(super) fn hashed(
    group: &GroupSummaries,
    rule: Option<&Rule>,
    mask: &KeyMask,
) -> GroupSummaries {
    let summary = |summary: &Option<Summary>| {
        let summary = summary.as_ref()?;
        let mut floor = summary.floor();
        let mut keys: Vec<(Vec<u8>, u64, u64)> = Vec::with_capacity(summary.len());
        for (key, count, error) in summary.iter() {
            match hashed_key(key, rule, mask) {
                Some(key) => keys.push((key, count, error)),
                // The key does not fit the rule, because it was counted while the rule had
                // different key entries.
                None => floor = floor.max(count),
            }
        }
        // A reader rejects a summary that contains a key whose count is below the floor.
        keys.retain(|(_, count, _)| *count >= floor);
        let keys = keys.iter();
        let keys: Vec<SummaryEntry<'_>> = keys
            .map(|(key, count, error)| (key.as_slice(), *count, *error))
            .collect();
        Some(Summary::new(floor, keys))
    };
    GroupSummaries {
        tally: group.tally,
        streams: group.streams.each_ref().map(summary),
    }
}

/// Returns `key`, an encoded key of a rule, without the rule's scope at its start.
pub(super) fn without_scope(key: &[u8]) -> &[u8] {
    key.get(SCOPE_BYTES..).unwrap_or_default()
}

pub(super) fn hashed_key(key: &[u8], rule: Option<&Rule>, mask: &KeyMask) -> Option<Vec<u8>> {
    let Some(rule) = rule else {
        let (database, key) = free_key_parts(key);
        let mut buffer = Vec::new();
        return Some(free_key_in(database, &mask.bytes(key), &mut buffer).to_vec());
    };
    let values = rule.decode_values(key)?;
    let hashed: Vec<_> = values.into_iter().map(|value| mask.value(value)).collect();
    let hashed: Vec<&str> = hashed.iter().map(|value| &**value).collect();
    let encoded = rule.encode_key(&hashed).ok()?;
    Some(without_scope(&encoded).to_vec())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tidegate_config::Config;

    use super::*;

    fn hashed_keys(keys: Vec<SummaryEntry<'_>>, rule: Option<&Rule>) -> Summary {
        let group = GroupSummaries {
            streams: [Some(Summary::new(2, keys)), None, None],
            ..GroupSummaries::default()
        };
        let [hashed, ..] = hashed(&group, rule, &KeyMask::hashed(b"secret")).streams;
        hashed.unwrap()
    }

    #[test]
    fn different_binary_keys_have_different_hashes() {
        let hashed = hashed_keys(vec![(b"\xFE1", 5, 0), (b"\xFF1", 5, 0)], None);
        let keys: BTreeSet<&[u8]> = hashed.iter().map(|(key, ..)| key).collect();
        assert_eq!(keys.len(), 2);
    }

    #[test]
    fn a_summary_with_a_key_of_a_former_rule_is_readable() {
        let rules = Config::parse("rules: [{name: r, key: [ip], limits: [1/h]}]");
        let rules = rules.unwrap().rules;
        // The second key is not UTF-8, so it is not a key of the rule.
        let keys: Vec<SummaryEntry<'_>> = vec![(b"a", 9, 0), (b"\xFF", 7, 0), (b"b", 3, 0)];
        let hashed = hashed_keys(keys, rules.rule("r"));
        assert_eq!((hashed.floor(), hashed.len()), (7, 1));
        let unpacked = Summary::unpack(hashed.floor(), hashed.len(), hashed.packed());
        assert_eq!(unpacked, Some(hashed));
    }
}
