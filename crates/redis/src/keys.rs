//! Lists the keys of a rule with `SCAN`, which visits all keys of a server in several calls.

use redis::Cmd;

use crate::{
    call::Reply,
    decode,
    error::StoreError,
    exec::{self, ExecError},
    layout,
    store::RedisStore,
};

/// The maximum number of `SCAN` commands per call.
const SCANS_PER_CALL: usize = 100;

/// The minimum number of keys that one `SCAN` visits. Without this minimum, a listing in small
/// pages could need one command for each key on the server.
const MIN_KEYS_PER_SCAN: usize = 100;

/// A position in a key listing. The default position is the beginning of the listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScanPosition {
    /// The server at which the listing continues. In a cluster, `server` is the address of the
    /// server. `server` is empty for the first server.
    pub server: String,
    /// The cursor of `SCAN`.
    pub cursor: u64,
}

/// A page of a key listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScannedKeys {
    /// The keys, in the form in which they were charged, and in no particular order. As with
    /// `SCAN`, a key may occur twice in a listing.
    pub keys: Vec<Vec<u8>>,
    /// The position of the next page; `None` if this is the last page. A page can have few keys or
    /// no keys even if it is not the last page.
    pub next: Option<ScanPosition>,
}

impl RedisStore {
    /// Returns a page of about `most` keys, starting at `from`. All keys belong to the rule that
    /// `scope` identifies. A page can have fewer keys, or none, although more pages follow. A page
    /// can also exceed `most` by up to `most` keys, or by up to 100 keys if `most` is below 100.
    ///
    /// A call sends at most 100 `SCAN` commands. For each command, the server visits about `most`
    /// of its keys, but at least 100. The visited keys can belong to any store and any rule. The
    /// listing returns a key at least once if the key exists during the whole listing, unless the
    /// set of servers in the cluster changes in the meantime.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if a server cannot be queried, if the server in `from` is unknown, or if the
    /// owner of any slot is unknown.
    pub async fn scan_keys(
        &self,
        scope: [u8; 8],
        from: &ScanPosition,
        most: usize,
    ) -> Result<ScannedKeys, StoreError> {
        let servers = self.executor.servers().map_err(store_error)?;
        let mut at = match from.server.as_str() {
            "" => 0,
            name => servers
                .iter()
                .position(|server| server == name)
                .ok_or_else(|| unknown_server(name))?,
        };
        let pattern = layout::rule_pattern(self.prefix(), scope);
        let keys_per_scan = most.max(MIN_KEYS_PER_SCAN);
        let (mut page, mut cursor) = (ScannedKeys::default(), from.cursor);
        for _ in 0..SCANS_PER_CALL {
            let Some(server) = servers.get(at) else {
                return Ok(page);
            };
            let (next, keys) = self.scan(server, cursor, &pattern, keys_per_scan).await?;
            let keys = keys.iter();
            let keys = keys.filter_map(|key| layout::rule_key(self.prefix(), scope, key));
            page.keys.extend(keys);
            cursor = next;
            if cursor == 0 {
                at += 1;
            }
            if page.keys.len() >= most {
                break;
            }
        }
        page.next = servers.get(at).map(|server| ScanPosition {
            server: server.clone(),
            cursor,
        });
        Ok(page)
    }

    /// Sends one `SCAN` command. Returns the next cursor and the keys found.
    async fn scan(
        &self,
        server: &str,
        cursor: u64,
        pattern: &[u8],
        count: usize,
    ) -> Result<(u64, Vec<Vec<u8>>), StoreError> {
        let mut command = Cmd::new();
        command.arg("SCAN").arg(cursor);
        command.arg("MATCH").arg(pattern).arg("COUNT").arg(count);
        let reply = self.executor.run_on(server, command).await;
        let reply = reply.and_then(exec::parse_reply).map_err(store_error)?;
        parse(reply).ok_or_else(StoreError::unexpected_reply)
    }
}

fn store_error(error: ExecError) -> StoreError {
    match error {
        ExecError::NotExecuted(problem) | ExecError::SplitHashSlot(problem) => {
            StoreError::NotExecuted(problem)
        }
        // A read-only command can be repeated, so it does not matter whether it was executed.
        ExecError::Unknown(problem) => StoreError::NotExecuted(problem),
        ExecError::Refused(problem) => StoreError::Refused(problem),
        ExecError::WrongType => StoreError::unexpected_reply(),
    }
}

fn unknown_server(name: &str) -> StoreError {
    StoreError::NotExecuted(format!(
        "{name} is no longer a primary of the cluster; start the listing again"
    ))
}

fn parse(reply: Reply) -> Option<(u64, Vec<Vec<u8>>)> {
    let Reply::Array(parts) = reply else {
        return None;
    };
    let [cursor, keys] = <[Reply; 2]>::try_from(parts).ok()?;
    let cursor = std::str::from_utf8(&decode::bytes(cursor)?)
        .ok()?
        .parse()
        .ok()?;
    Some((cursor, decode::keys(keys)?))
}
