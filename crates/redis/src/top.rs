//! Publishes and reads time slices of the top-talker lists. Each server publishes the slices of its
//! own list so that all other servers can read them.
//!
//! Each server has a hash with one field per time slice. A new slice overwrites the slice for the
//! same time of the previous day, so the size of the hash is bounded. If a server stops publishing
//! slices, its hash expires.

use std::time::Duration;

use crate::{call::Reply, decode, error::StoreError, layout, scripts, store::RedisStore};

/// How long the slices of a server are kept after its last publication. A slice is kept for longer
/// than the longest period of a list.
const EXPIRES_AFTER: Duration = Duration::from_secs(26 * 3_600);

/// The maximum number of servers whose slices are listed. If there are more, the servers that
/// published least recently are dropped.
const MAX_SERVERS: usize = 1_000;

/// A time slice to publish: the field of the hash, and the bytes.
pub type PublishedSlice = (String, Vec<u8>);

impl RedisStore {
    /// Publishes a slice of the server with this id. Decisions in the same batch wait until the
    /// call is complete, so each call publishes only one slice.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the slice was not published, or if the outcome is unknown. Retrying is
    /// safe.
    pub async fn publish_slice(
        &self,
        server: &str,
        (field, bytes): PublishedSlice,
    ) -> Result<(), StoreError> {
        let expiry = millis(EXPIRES_AFTER);
        let put = vec![b"put".to_vec(), expiry, field.into_bytes(), bytes];
        self.call(&scripts::TOP, vec![self.slices_key(server)], put)
            .await?;
        self.call_servers("join", server).await?;
        Ok(())
    }

    /// Returns the ids of all servers with published slices.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the server cannot be queried.
    pub async fn publishing_servers(&self) -> Result<Vec<String>, StoreError> {
        let reply = self.call_servers("list", "").await?;
        let ids = decode::keys(reply).ok_or_else(StoreError::unexpected_reply)?;
        let ids = ids.into_iter();
        Ok(ids.filter_map(|id| String::from_utf8(id).ok()).collect())
    }

    /// Returns the slices of a server in the given fields. Fields that do not exist are left out.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the server cannot be queried.
    pub async fn published_slices(
        &self,
        server: &str,
        fields: &[String],
    ) -> Result<Vec<Vec<u8>>, StoreError> {
        let mut get = vec![b"get".to_vec()];
        get.extend(fields.iter().map(|field| field.clone().into_bytes()));
        let key = self.slices_key(server);
        match self.call(&scripts::TOP, vec![key], get).await? {
            Reply::Array(slices) => Ok(slices.into_iter().filter_map(decode::bytes).collect()),
            _ => Err(StoreError::unexpected_reply()),
        }
    }

    async fn call_servers(&self, verb: &str, server: &str) -> Result<Reply, StoreError> {
        let args = vec![
            verb.as_bytes().to_vec(),
            server.as_bytes().to_vec(),
            millis(EXPIRES_AFTER),
            MAX_SERVERS.to_string().into_bytes(),
        ];
        self.call(&scripts::TOP, vec![self.publishers_key()], args)
            .await
    }

    fn publishers_key(&self) -> Vec<u8> {
        layout::publishers_key(self.prefix())
    }

    fn slices_key(&self, server: &str) -> Vec<u8> {
        layout::slices_key(self.prefix(), server)
    }
}

fn millis(time: Duration) -> Vec<u8> {
    time.as_millis().to_string().into_bytes()
}
