//! What an operator does to one key: on this node, or on every node of a fleet at once.

use tidegate_core::{Block, Charge, Effect, Outcome, Span, Store};
use tidegate_redis::StoreError;

use crate::limiter::Limiter;

impl Limiter {
    /// Every block that stands, in no order.
    ///
    /// # Errors
    ///
    /// If Redis, where a fleet's blocks are, cannot be asked.
    pub async fn blocks(&self) -> Result<Vec<Block>, StoreError> {
        match self.fleet() {
            Some(fleet) => fleet.store().blocks().await,
            None => Ok(self.local_store().blocks(self.now())),
        }
    }

    /// The block that stands on `key`.
    ///
    /// # Errors
    ///
    /// If Redis, where a fleet's blocks are, cannot be asked.
    pub async fn block_on(&self, key: &[u8]) -> Result<Option<Block>, StoreError> {
        match self.fleet() {
            Some(fleet) => fleet.store().block_on(key).await,
            None => Ok(self.local_store().block_on(key, self.now())),
        }
    }

    /// Blocks `key` for `span`, or until it is lifted; false, and nothing changes, if there are too many blocks.
    ///
    /// # Errors
    ///
    /// If Redis, where a fleet's blocks are, did not do it, or nobody knows.
    pub async fn block(
        &self,
        key: &[u8],
        span: Option<Span>,
        reason: &str,
    ) -> Result<bool, StoreError> {
        if let Some(fleet) = self.fleet()
            && !fleet.store().block(key, span, reason).await?
        {
            return Ok(false);
        }
        // With a fleet, this is what stands while Redis is out of reach.
        Ok(self.local_store().block(key, span, reason, self.now()))
    }

    /// Lifts the block on `key`; true if one stood.
    ///
    /// # Errors
    ///
    /// If Redis, where a fleet's blocks are, did not do it, or nobody knows.
    pub async fn unblock(&self, key: &[u8]) -> Result<bool, StoreError> {
        let here = self.local_store().unblock(key, self.now());
        let Some(fleet) = self.fleet() else {
            return Ok(here);
        };
        fleet.forget_denials();
        fleet.store().unblock(key).await
    }

    /// Forgets what `key` has spent; true if there was anything. A block on it stands.
    ///
    /// # Errors
    ///
    /// If Redis, where a fleet's counts are, did not do it, or nobody knows.
    pub async fn reset(&self, key: &[u8]) -> Result<bool, StoreError> {
        let here = self.local_store().reset(key);
        let Some(fleet) = self.fleet() else {
            return Ok(here);
        };
        let reset = fleet.store().reset(key).await;
        fleet.forget_denials();
        reset
    }

    /// [`Self::reset`], if Redis need not be asked; `None` leaves everything as it was.
    pub(crate) fn reset_now(&self, key: &[u8]) -> Option<bool> {
        match self.fleet() {
            Some(_) => None,
            None => Some(self.local_store().reset(key)),
        }
    }

    /// What `charge` would be answered, charging nothing: how it stands ([`Effect::Look`]), or what would come of it
    /// ([`Effect::Peek`]). No outcomes while a block stands.
    ///
    /// # Errors
    ///
    /// If Redis, where a fleet's counts are, cannot be asked.
    pub async fn inspect(
        &self,
        charge: Charge<'_>,
        effect: Effect,
    ) -> Result<Vec<Outcome>, StoreError> {
        let (charges, mut outcomes) = ([charge], Vec::new());
        // What is inspected is never charged.
        let effect = match effect {
            Effect::Charge | Effect::Peek => Effect::Peek,
            Effect::Look | Effect::Refund => Effect::Look,
        };
        match self.fleet() {
            Some(fleet) => {
                fleet.store().check(&charges, effect, &mut outcomes).await?;
            }
            None => {
                self.local_store()
                    .check(&charges, self.now(), effect, &mut outcomes);
            }
        }
        Ok(outcomes)
    }
}
