//! Overrides in Redis, which all servers share. The store keeps opaque documents by id, and lists
//! the changes after a given version, so that each server can keep a copy of all overrides.

use tidegate_core::{Timestamp, bounds};

use crate::{call::Reply, decode, error::StoreError, layout, scripts, store::RedisStore};

/// The maximum number of changes that one call reads. Decisions in the same batch wait until the
/// call is complete.
const CHANGES_PER_READ: u64 = 500;

/// The number of removals that Redis stores. A server that has missed more removals reads all
/// overrides again.
const MAX_REMOVALS: u64 = 10_000;

/// The maximum number of overrides that one call of [`RedisStore::sweep_overrides`] removes.
const SWEPT_PER_CALL: u64 = 500;

/// The position up to which a server has read the override changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverrideVersion {
    /// The version up to which all changes have been read.
    read: u64,
    /// While all overrides are being read, the newest version at the start of the read. All
    /// removals since that version must be known.
    base: Option<u64>,
}

impl OverrideVersion {
    /// Returns whether nothing has been read yet, so that the next call reads all overrides.
    #[must_use]
    pub fn is_beginning(self) -> bool {
        self.read == 0
    }

    /// Returns whether a call with this version completes a read of all overrides. `has_more` comes
    /// from the reply to the same call.
    #[must_use]
    pub fn is_replacing(self, has_more: bool) -> bool {
        (self.is_beginning() || self.base.is_some()) && !has_more
    }
}

/// The override changes since a version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverrideChanges {
    /// The version up to which `overrides` contains all changes.
    pub version: OverrideVersion,
    /// Whether there are later changes.
    pub has_more: bool,
    /// The ids and documents of new or changed overrides.
    pub set: Vec<(Vec<u8>, Vec<u8>)>,
    /// The ids of removed overrides.
    pub removed: Vec<Vec<u8>>,
}

/// The result of [`RedisStore::put_override`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverridePutResult {
    /// The override was set. Contains the document of the override that it replaced, even if
    /// another server has just set that override.
    Set(Option<Vec<u8>>),
    /// Nothing has changed, because there are already [`bounds::MAX_OVERRIDES`] other overrides.
    TooMany,
}

impl RedisStore {
    /// Sets the override `id` to `document`. `until` is the instant at which the override ends;
    /// `None` if it has no end.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the override was not set, or if the outcome is unknown. Retrying is safe.
    pub async fn put_override(
        &self,
        id: Vec<u8>,
        document: Vec<u8>,
        until: Option<Timestamp>,
    ) -> Result<OverridePutResult, StoreError> {
        let until = until.map(|until| text(until.as_micros().div_ceil(1_000)));
        let most = text(bounds::MAX_OVERRIDES as u64);
        let put = vec![
            b"put".to_vec(),
            id,
            document,
            until.unwrap_or_default(),
            most,
        ];
        let reply = self.call_overrides(put).await?;
        if decode::integer(&reply) == Some(0) {
            return Ok(OverridePutResult::TooMany);
        }
        let replaced = decode::bytes(reply).ok_or_else(StoreError::unexpected_reply)?;
        Ok(OverridePutResult::Set(
            Some(replaced).filter(|document| !document.is_empty()),
        ))
    }

    /// Removes the override `id`, and returns its document. Returns `None` if there was no override
    /// with this id.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the override was not removed, or if the outcome is unknown. Retrying is
    /// safe.
    pub async fn drop_override(&self, id: Vec<u8>) -> Result<Option<Vec<u8>>, StoreError> {
        let drop = vec![b"drop".to_vec(), id, text(MAX_REMOVALS)];
        let reply = self.call_overrides(drop).await?;
        let document = decode::bytes(reply).ok_or_else(StoreError::unexpected_reply)?;
        Ok((!document.is_empty()).then_some(document))
    }

    /// Removes overrides that have expired by `now`. Returns true if more expired overrides may
    /// remain.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if Redis cannot be queried.
    pub async fn sweep_overrides(&self, now: Timestamp) -> Result<bool, StoreError> {
        let now = text(now.as_micros() / 1_000);
        let sweep = vec![
            b"sweep".to_vec(),
            now,
            text(SWEPT_PER_CALL),
            text(MAX_REMOVALS),
        ];
        let reply = self.call_overrides(sweep).await?;
        Ok(decode::integer(&reply) == Some(SWEPT_PER_CALL))
    }

    /// Returns the override changes after `version`, oldest first. For the default version, all
    /// overrides are returned. Returns `None` if Redis no longer knows which changes followed
    /// `version`, for example because Redis has lost its data. If the result is `None`, read all
    /// overrides again, starting with the default version.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if Redis cannot be queried.
    pub async fn override_changes(
        &self,
        version: OverrideVersion,
    ) -> Result<Option<OverrideChanges>, StoreError> {
        let OverrideVersion { read, base } = version;
        let changes = [read, CHANGES_PER_READ, base.unwrap_or(read)].map(text);
        let args = std::iter::once(b"changes".to_vec()).chain(changes);
        let reply = self.call_overrides(args.collect()).await?;
        parse(reply, version).ok_or_else(StoreError::unexpected_reply)
    }

    async fn call_overrides(&self, args: Vec<Vec<u8>>) -> Result<Reply, StoreError> {
        let keys = layout::overrides_keys(self.prefix());
        self.call(&scripts::OVERRIDES, keys.to_vec(), args).await
    }
}

/// Decodes the reply of the operation `changes` after `version`.
fn parse(reply: Reply, version: OverrideVersion) -> Option<Option<OverrideChanges>> {
    let Reply::Array(parts) = reply else {
        return None;
    };
    if let [Reply::Int(-1)] = parts.as_slice() {
        return Some(None);
    }
    let [read, has_more, set, removed, newest] = <[Reply; 5]>::try_from(parts).ok()?;
    let has_more = decode::integer(&has_more)? == 1;
    let newest = decode::integer(&newest)?;
    let base = match version.is_beginning() {
        true => Some(newest),
        false => version.base,
    };
    let mut texts = decode::keys(set)?.into_iter();
    let pairs = std::iter::from_fn(|| Some((texts.next()?, texts.next()?)));
    Some(Some(OverrideChanges {
        version: OverrideVersion {
            read: decode::integer(&read)?,
            base: base.filter(|_| has_more),
        },
        has_more,
        set: pairs.collect(),
        removed: decode::keys(removed)?,
    }))
}

fn text(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}
