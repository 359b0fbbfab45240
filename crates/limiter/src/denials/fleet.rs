//! Recent denials from all servers that share a Redis.
//!
//! Each server publishes its new denials every second, at most [`MAX_PUBLICATION`]. Any server can
//! read the denials that other servers published, and merge these denials with its own. A killed
//! server loses at most the denials from the last second.

use std::{
    cmp::Reverse,
    sync::{MutexGuard, PoisonError},
};

use tidegate_net::prometheus::Metric;
use tidegate_redis::RedisStore;

use super::{
    DenialFilter, DenialList, DenialLog, DenialRecord, PublishedCounts,
    record::{NewDenial, Record},
};
use crate::KeyMask;

pub(super) static PUBLICATIONS: Metric<1> = Metric::counter(
    "tidegate_denial_publications_total",
    ["result"],
    "Attempts to write the recent denials of this server to Redis, by result.",
);

/// The maximum number of denials in one publication. If there are more denials, only the newest
/// denials are published.
const MAX_PUBLICATION: usize = 200;

/// The maximum length in bytes of a published denial, including its request entries. Entries that
/// do not fit are left out.
const MAX_PUBLISHED_BYTES: usize = 1_536;

/// The length of a server ID, in bytes.
const ID_BYTES: usize = 32;

/// The first byte of a published denial whose values are not hashed.
const PLAIN: u8 = 0;
/// The first byte of a published denial whose values are hashed.
const HASHED: u8 = 1;

/// The denials that the other servers have published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherDenials {
    /// The selected denials, newest first. The values are hashed if the setting `privacy` requires
    /// it.
    pub list: DenialList,
    /// The error that prevented this server from reading all other servers' denials; `None` if
    /// there was none.
    pub problem: Option<String>,
}

impl OtherDenials {
    /// Returns the result to use if the other servers' denials cannot be read.
    #[must_use]
    pub fn unknown(problem: String) -> Self {
        Self {
            problem: Some(problem),
            ..Self::default()
        }
    }
}

/// The denials in one publication.
#[derive(Debug, Default)]
struct UnpublishedDenials {
    /// The newest denials since the last publication, oldest first.
    denials: Vec<DenialRecord>,
    /// The number of denials since the last publication that will not be published.
    unpublished: u64,
}

impl DenialLog {
    fn published(&self) -> MutexGuard<'_, PublishedCounts> {
        self.published
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the denials since the last call.
    fn take_new(&self) -> UnpublishedDenials {
        let mut published = self.published();
        let mut total = std::mem::take(&mut published.failed);
        let mut denials = Vec::new();
        published
            .shards
            .resize_with(self.shards.len(), Default::default);
        for (shard, last) in self.shards.iter().zip(&mut published.shards) {
            let ring = shard.ring();
            let counts = ring.counts();
            if counts == *last {
                continue;
            }
            // The lock is released before the records are read.
            let snapshot = ring.snapshot();
            drop(ring);
            let added = counts.added - last.added;
            total += added + (counts.unrecorded - last.unrecorded);
            *last = counts;
            // The snapshot may have fewer than `added` new records, because a full ring drops its
            // oldest ones.
            let newest = usize::try_from(added).unwrap_or(usize::MAX);
            let records = snapshot.segments.iter();
            let records = records.flat_map(|segment| segment.newest_first());
            let records = records.take(newest.min(MAX_PUBLICATION));
            denials.extend(records.filter_map(|record| Some(Record::decode(record)?.to_denial())));
        }
        denials.sort_by_key(|denial| Reverse(denial.at));
        denials.truncate(MAX_PUBLICATION);
        denials.reverse();
        UnpublishedDenials {
            unpublished: total - length(&denials),
            denials,
        }
    }

    /// Publishes the denials since the last publication in `store`. Has no effect if no denials are
    /// kept, or while another publication is in progress.
    ///
    /// If a publication fails, its denials are not published again, because Redis may have received
    /// them, and count as lost.
    pub(crate) async fn publish(&self, store: &RedisStore, mask: &KeyMask) {
        if !self.is_kept() {
            return;
        }
        let Some(_publication) = self.publisher.begin() else {
            return;
        };
        let UnpublishedDenials {
            denials,
            unpublished,
        } = self.take_new();
        if denials.is_empty() && unpublished == 0 {
            return;
        }
        let count = length(&denials);
        let packed = denials.into_iter().map(|denial| {
            let denial = denial.masked(mask);
            pack(&denial, self.publisher.id(), mask)
        });
        let result = store.publish_denials(packed.collect(), unpublished).await;
        self.publisher.record(&result);
        let mut published = self.published();
        match result {
            Ok(()) => published.unpublished += unpublished,
            Err(_) => published.failed += count + unpublished,
        }
    }

    /// Returns up to `most` of the newest denials that other servers have published in `store` and
    /// that `filter` selects.
    pub(crate) async fn of_other_servers(
        &self,
        store: &RedisStore,
        mask: &KeyMask,
        filter: &DenialFilter<'_>,
        most: usize,
    ) -> OtherDenials {
        let mut others = OtherDenials::default();
        let own_id = self.publisher.id();
        let mut after = None;
        loop {
            let page = match store.published_denials(after).await {
                Ok(page) => page,
                Err(error) => {
                    others.problem = Some(error.to_string());
                    return others;
                }
            };
            let own = self.published().unpublished;
            others.list.lost = page.lost.saturating_sub(own);
            let records = page.denials.iter().map(Vec::as_slice);
            let records: Vec<PublishedDenial<'_>> =
                records.filter_map(PublishedDenial::decode).collect();
            // This server lists its own denials from memory.
            let of_others = records
                .iter()
                .filter(|record| record.server != own_id.as_bytes());
            let of_others = of_others.map(|record| record.to_denial(mask));
            let selected = of_others.filter(|denial| selects(filter, denial, mask));
            others.list.denials.extend(selected);
            after = page.next;
            let newest = records.iter().map(|record| record.record.at).max();
            let is_old = newest.is_some_and(|newest| newest < filter.since);
            if after.is_none() || is_old || others.list.denials.len() >= most {
                break;
            }
        }
        let denials = &mut others.list.denials;
        denials.sort_by_key(|denial| Reverse(denial.at));
        denials.truncate(most);
        others
    }
}

fn length(denials: &[DenialRecord]) -> u64 {
    u64::try_from(denials.len()).unwrap_or(u64::MAX)
}

fn pack(denial: &DenialRecord, server: &str, mask: &KeyMask) -> Vec<u8> {
    let key: Vec<&str> = denial.key.iter().map(String::as_str).collect();
    let entries = denial.entries.iter();
    let entries: Vec<(&str, &str)> = entries
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let record = NewDenial {
        at: denial.at,
        listener: denial.listener,
        mode: denial.mode,
        reason: denial.reason,
        retry_after: denial.retry_after,
        rule: denial.rule.as_deref(),
        policy: denial.policy.as_deref(),
        key: &key,
        entries: &entries,
    };
    let mut packed = vec![if mask.is_hashed() { HASHED } else { PLAIN }];
    packed.extend_from_slice(server.as_bytes());
    record.encode_within(MAX_PUBLISHED_BYTES, &mut packed);
    packed
}

/// A published denial. The request entries in `record` are not decoded yet.
struct PublishedDenial<'p> {
    /// The ID of the server that published the denial.
    server: &'p [u8],
    is_hashed: bool,
    record: Record<'p>,
}

impl<'p> PublishedDenial<'p> {
    /// Decodes bytes written by [`pack`].
    fn decode(packed: &'p [u8]) -> Option<Self> {
        let (kind, rest) = packed.split_first()?;
        let (server, record) = rest.split_at_checked(ID_BYTES)?;
        let is_hashed = match *kind {
            PLAIN => false,
            HASHED => true,
            _ => return None,
        };
        Some(Self {
            server,
            is_hashed,
            record: Record::decode(record)?,
        })
    }

    /// Copies the record into a [`DenialRecord`]. The values are hashed if the publishing server or
    /// this server hashes values.
    fn to_denial(&self, mask: &KeyMask) -> DenialRecord {
        let denial = self.record.to_denial();
        if self.is_hashed {
            denial
        } else {
            denial.masked(mask)
        }
    }
}

/// Returns whether `filter` selects `denial`. The values of `denial` are already hashed if `mask`
/// hashes values.
fn selects(filter: &DenialFilter<'_>, denial: &DenialRecord, mask: &KeyMask) -> bool {
    let has_key = || {
        let wanted = filter.key.iter().map(|value| mask.value(value));
        denial.key.len() == filter.key.len() && wanted.zip(&denial.key).all(|(a, b)| a == *b)
    };
    denial.at >= filter.since
        && filter
            .rule
            .is_none_or(|rule| denial.rule.as_deref() == Some(rule))
        && (filter.key.is_empty() || has_key())
}
