//! Overrides in Redis, which all servers share. The store keeps opaque documents by id, and lists
//! what has changed since a version, so that each server keeps a copy of all overrides.

use tidegate_core::bounds;

use crate::{call::Reply, decode, error::StoreError, layout, scripts, store::RedisStore};

/// The number of changes that one call reads. Decisions that are sent in the same batch wait for
/// the call.
const CHANGES_PER_READ: u64 = 500;

/// The changes of the overrides since a version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverrideChanges {
    /// The version up to which the changes are complete.
    pub version: u64,
    /// Whether there are later changes.
    pub has_more: bool,
    /// The ids of the overrides that were set, with their documents.
    pub set: Vec<(Vec<u8>, Vec<u8>)>,
    /// The ids of the overrides that were removed.
    pub removed: Vec<Vec<u8>>,
}

impl RedisStore {
    /// Sets the override `id` to `document`. Returns false and changes nothing if there are
    /// [`bounds::MAX_OVERRIDES`] others.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the override was not set, or if the outcome is unknown. Retrying is safe.
    pub async fn put_override(&self, id: Vec<u8>, document: Vec<u8>) -> Result<bool, StoreError> {
        let most = text(bounds::MAX_OVERRIDES as u64);
        let reply = self
            .call_overrides(vec![b"put".to_vec(), id, document, most])
            .await?;
        Ok(decode::integer(&reply) == Some(1))
    }

    /// Removes the override `id`, and returns true if it existed. With a `document`, removes the
    /// override only if it still has this document.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the override was not removed, or if the outcome is unknown. Retrying is
    /// safe.
    pub async fn drop_override(
        &self,
        id: Vec<u8>,
        document: Option<Vec<u8>>,
    ) -> Result<bool, StoreError> {
        let drop = vec![b"drop".to_vec(), id, document.unwrap_or_default()];
        let reply = self.call_overrides(drop).await?;
        Ok(decode::integer(&reply) == Some(1))
    }

    /// Returns changes of the overrides after `version`, oldest first. Version 0 stands for the
    /// beginning. Returns `None` if the changes since `version` are not known, for example because
    /// Redis has lost its data: then all overrides must be read again from version 0.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if Redis cannot be queried.
    pub async fn override_changes(
        &self,
        version: u64,
    ) -> Result<Option<OverrideChanges>, StoreError> {
        let changes = vec![b"changes".to_vec(), text(version), text(CHANGES_PER_READ)];
        let reply = self.call_overrides(changes).await?;
        parse(reply).ok_or_else(StoreError::unexpected_reply)
    }

    async fn call_overrides(&self, args: Vec<Vec<u8>>) -> Result<Reply, StoreError> {
        let keys = layout::overrides_keys(self.prefix());
        self.call(&scripts::OVERRIDES, keys.to_vec(), args).await
    }
}

/// Decodes the reply of the operation `changes`.
fn parse(reply: Reply) -> Option<Option<OverrideChanges>> {
    let Reply::Array(parts) = reply else {
        return None;
    };
    if let [Reply::Int(-1)] = parts.as_slice() {
        return Some(None);
    }
    let [version, has_more, set, removed] = <[Reply; 4]>::try_from(parts).ok()?;
    let mut texts = decode::keys(set)?.into_iter();
    let pairs = std::iter::from_fn(|| Some((texts.next()?, texts.next()?)));
    Some(Some(OverrideChanges {
        version: decode::integer(&version)?,
        has_more: decode::integer(&has_more)? == 1,
        set: pairs.collect(),
        removed: decode::keys(removed)?,
    }))
}

fn text(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}
