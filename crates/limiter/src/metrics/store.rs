//! Metrics of the memory store.

use tidegate_core::MemoryStats;
use tidegate_net::prometheus::Text;

pub(super) fn write(text: &mut Text, store: &MemoryStats) {
    let size = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    text.single(
        "tidegate_keys",
        "gauge",
        "Keys in the store.",
        size(store.keys),
    );
    text.single(
        "tidegate_store_bytes",
        "gauge",
        "Memory used by the store, in bytes.",
        size(store.bytes),
    );
    text.single(
        "tidegate_refund_ledger_bytes",
        "gauge",
        "Memory used by the refund ledger, in bytes.",
        size(store.ledger_bytes),
    );
    text.single(
        "tidegate_blocks",
        "gauge",
        "Manual blocks in effect.",
        size(store.blocks),
    );
    let help = "Keys removed because they had expired.";
    text.single(
        "tidegate_keys_expired_total",
        "counter",
        help,
        store.expired,
    );
    let help = "Live keys evicted to make room.";
    text.single(
        "tidegate_keys_evicted_total",
        "counter",
        help,
        store.evicted,
    );
    let name = "tidegate_store_full_total";
    text.family(
        name,
        "counter",
        "Charges on new keys, or on logs that had to grow, while the store was full.",
    );
    text.sample(name, &[("outcome", "denied")], store.denied_when_full);
    text.sample(name, &[("outcome", "allowed")], store.admitted_when_full);
}
