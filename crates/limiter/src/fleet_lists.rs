//! The lists of top talkers and of recent denials. With Redis, each server publishes its lists, so
//! that every server can also report the requests to the other servers.

use tidegate_redis::RedisStore;

use crate::{
    ServerLimiter,
    denials::{DenialFilter, OtherDenials},
    top::{HistoryQuery, KeyHistory, OtherServers, PublishedHistory, TopError, TopList, TopQuery},
};

impl ServerLimiter {
    /// Ranks keys by their requests, denials or cost, on this server and on `others`. The ranking
    /// takes milliseconds, so listeners call this method on a thread that does not decide requests.
    ///
    /// # Errors
    ///
    /// Fails if the lists are off, or if the rule does not exist or has no list.
    pub fn top(&self, query: &TopQuery, others: &OtherServers) -> Result<TopList, TopError> {
        let talkers = self.top_talkers().ok_or(TopError::Off)?;
        let (rules, now) = (self.rules(), self.now());
        talkers.list(query, others, &rules, self.key_mask(), now)
    }

    /// Returns the requests and denials of a key on this server and on the `others`. The method
    /// takes milliseconds, so listeners call it on a thread that does not decide requests.
    ///
    /// # Errors
    ///
    /// Fails if lists of top talkers are off, or if the rule does not exist or has no list.
    pub fn key_history(
        &self,
        query: &HistoryQuery,
        others: &PublishedHistory,
    ) -> Result<KeyHistory, TopError> {
        let talkers = self.top_talkers().ok_or(TopError::Off)?;
        let (rules, now) = (self.rules(), self.now());
        talkers.key_history(query, others, &rules, self.key_mask(), now)
    }

    /// Reads the top talkers that the other servers have published. Without Redis, there are no
    /// other servers.
    pub async fn top_of_others(&self, query: &TopQuery) -> OtherServers {
        let (Some(talkers), Some(store)) = (self.top_talkers(), self.shared_store()) else {
            return OtherServers::default();
        };
        let (rules, now) = (self.rules(), self.now());
        talkers.of_other_servers(store, &rules, query, now).await
    }

    /// Reads the history of a key that the other servers have published. Without Redis, there are
    /// no other servers.
    pub async fn history_of_others(&self, query: &HistoryQuery) -> PublishedHistory {
        let (Some(talkers), Some(store)) = (self.top_talkers(), self.shared_store()) else {
            return PublishedHistory::default();
        };
        let (rules, now) = (self.rules(), self.now());
        let history = talkers.history_of_other_servers(store, &rules, query, now);
        history.await
    }

    /// Returns up to `most` of the newest denials on other servers that `filter` selects. Without
    /// Redis, there are no other servers.
    pub async fn denials_of_others(&self, filter: &DenialFilter<'_>, most: usize) -> OtherDenials {
        let Some(store) = self.shared_store() else {
            return OtherDenials::default();
        };
        let (log, mask) = (self.denials(), self.key_mask());
        log.of_other_servers(store, mask, filter, most).await
    }

    /// Publishes the top talkers and the denials since the last publication. Has no effect without
    /// Redis. Call this method every second.
    pub async fn publish_lists(&self) {
        let Some(store) = self.shared_store() else {
            return;
        };
        let mask = self.key_mask();
        if let Some(talkers) = self.top_talkers() {
            talkers.publish(store, &self.rules(), mask).await;
        }
        self.denials().publish(store, mask).await;
    }

    fn shared_store(&self) -> Option<&RedisStore> {
        self.redis_store().map(|store| store.store())
    }
}
