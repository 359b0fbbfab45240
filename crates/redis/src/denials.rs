//! Publishes and reads the recent denials of all servers that share a Redis.
//!
//! The denials are in one Redis hash, which serves as a ring buffer with [`MAX_PUBLISHED_DENIALS`]
//! entries. The hash expires if no server has published a denial for a day.

use std::time::Duration;

use crate::{call::Reply, decode, error::StoreError, layout, scripts, store::RedisStore};

/// How long the denials are kept after the last publication.
const EXPIRES_AFTER: Duration = Duration::from_secs(24 * 3_600);

/// The maximum number of denials that Redis keeps, for all servers together.
pub const MAX_PUBLISHED_DENIALS: u64 = 10_000;

/// The maximum number of denials that one call reads. Decisions in the same batch wait until the
/// call is complete.
const DENIALS_PER_READ: u64 = 250;

/// A page of published denials, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublishedDenials {
    /// The denials, as encoded by the servers that published them.
    pub denials: Vec<Vec<u8>>,
    /// The position after which the next page begins; `None` if this is the last page.
    pub next: Option<u64>,
    /// The number of lost denials: denials that were never published, and denials that newer
    /// denials have overwritten.
    pub lost: u64,
}

impl RedisStore {
    /// Publishes `denials`, which are sorted from oldest to newest. Adds `lost` to the shared count
    /// of denials that were never published.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the denials were not published, or if the outcome is unknown. A retry may
    /// publish the denials twice.
    pub async fn publish_denials(
        &self,
        denials: Vec<Vec<u8>>,
        lost: u64,
    ) -> Result<(), StoreError> {
        let expiry = EXPIRES_AFTER.as_millis().to_string().into_bytes();
        let mut put = vec![b"put".to_vec(), size(), expiry, text(lost)];
        put.extend(denials);
        self.call(&scripts::DENIALS, vec![self.denials_key()], put)
            .await?;
        Ok(())
    }

    /// Returns a page of the published denials. The page begins after the position `after`, which
    /// is `next` of the previous page. Without `after`, the page begins with the newest denial.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if Redis cannot be queried.
    pub async fn published_denials(
        &self,
        after: Option<u64>,
    ) -> Result<PublishedDenials, StoreError> {
        let before = after.map(text).unwrap_or_default();
        let get = vec![b"get".to_vec(), size(), before, text(DENIALS_PER_READ)];
        let reply = self
            .call(&scripts::DENIALS, vec![self.denials_key()], get)
            .await?;
        page(reply, after).ok_or_else(StoreError::unexpected_reply)
    }

    fn denials_key(&self) -> Vec<u8> {
        layout::denials_key(self.prefix())
    }
}

/// Decodes the reply of the operation `get`.
fn page(reply: Reply, after: Option<u64>) -> Option<PublishedDenials> {
    let Reply::Array(parts) = reply else {
        return None;
    };
    let [next, unpublished, found] = <[Reply; 3]>::try_from(parts).ok()?;
    let (next, unpublished) = (decode::integer(&next)?, decode::integer(&unpublished)?);
    let Reply::Array(found) = found else {
        return None;
    };
    let before = after.map_or(next, |after| after.min(next));
    let read = u64::try_from(found.len()).ok()?;
    let denials = found
        .into_iter()
        .filter_map(decode::bytes)
        .zip((0..before).rev());
    let denials = denials.filter_map(|(bytes, number)| {
        // An earlier version or another program wrote a field without this number.
        let denial = bytes.strip_prefix(format!("{number} ").as_bytes())?;
        Some(denial.to_vec())
    });
    Some(PublishedDenials {
        denials: denials.collect(),
        next: (read == DENIALS_PER_READ).then_some(before.saturating_sub(read)),
        lost: unpublished.saturating_add(next.saturating_sub(MAX_PUBLISHED_DENIALS)),
    })
}

fn size() -> Vec<u8> {
    text(MAX_PUBLISHED_DENIALS)
}

fn text(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_ends_before_the_oldest_denial() {
        let bulk = |text: &str| Reply::BulkString(text.as_bytes().to_vec());
        let reply = |found: Vec<Reply>| {
            Reply::Array(vec![Reply::Int(10_002), Reply::Int(3), Reply::Array(found)])
        };
        let found = vec![bulk("10001 b"), bulk("10000 a"), bulk("")];
        let expected = PublishedDenials {
            denials: vec![b"b".to_vec(), b"a".to_vec()],
            next: None,
            lost: 5,
        };
        assert_eq!(page(reply(found), None), Some(expected));
        let full = (0..250).map(|at| bulk(&format!("{} x", 10_001 - at)));
        let full = page(reply(full.collect()), None).unwrap();
        assert_eq!((full.denials.len(), full.next), (250, Some(9_752)));
        let overwritten = page(reply(vec![bulk("20000 x")]), Some(10_000)).unwrap();
        assert_eq!(overwritten.denials, Vec::<Vec<u8>>::new());
        assert_eq!(page(Reply::Int(1), None), None);
    }
}
