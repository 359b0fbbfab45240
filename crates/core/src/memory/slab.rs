//! Entries by number, in chunks that never move: growing copies nothing, and leaves no holes behind.

use super::entry::Entry;

#[derive(Debug, Default)]
pub(super) struct Slab {
    chunks: Vec<Vec<Entry>>,
    len: usize,
}

impl Slab {
    const CHUNK: usize = 64;

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.chunks.len() * Self::CHUNK * size_of::<Entry>()
            + self.chunks.capacity() * size_of::<Vec<Entry>>()
    }

    /// Bytes that pushing `entries` more adds.
    pub(super) fn growth_bytes(&self, entries: usize) -> usize {
        let chunks = (self.len + entries)
            .div_ceil(Self::CHUNK)
            .max(self.chunks.len());
        let mut capacity = self.chunks.capacity();
        while capacity < chunks {
            capacity += spare_chunks(capacity);
        }
        (chunks - self.chunks.len()) * Self::CHUNK * size_of::<Entry>()
            + (capacity - self.chunks.capacity()) * size_of::<Vec<Entry>>()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.chunks.iter().flatten()
    }

    pub(super) fn push(&mut self, entry: Entry) {
        if self.len == self.chunks.len() * Self::CHUNK {
            let capacity = self.chunks.capacity();
            if self.chunks.len() == capacity {
                self.chunks.reserve_exact(spare_chunks(capacity));
            }
            self.chunks.push(Vec::with_capacity(Self::CHUNK));
        }
        self.chunks[self.len / Self::CHUNK].push(entry);
        self.len += 1;
    }

    /// Removes an entry; the last one takes its number.
    pub(super) fn swap_remove(&mut self, number: usize) -> Option<Entry> {
        let last = self
            .chunks
            .get_mut(self.len.checked_sub(1)? / Self::CHUNK)?
            .pop()?;
        self.len -= 1;
        // One spare chunk stays, so that coming and going at a boundary allocates nothing.
        self.chunks.truncate(self.len.div_ceil(Self::CHUNK) + 1);
        if number == self.len {
            Some(last)
        } else {
            Some(std::mem::replace(&mut self[number], last))
        }
    }
}

/// A quarter more, so that a large slab wastes little.
fn spare_chunks(chunks: usize) -> usize {
    chunks / 4 + 4
}

impl std::ops::Index<usize> for Slab {
    type Output = Entry;

    #[inline]
    fn index(&self, number: usize) -> &Entry {
        &self.chunks[number / Self::CHUNK][number % Self::CHUNK]
    }
}

impl std::ops::IndexMut<usize> for Slab {
    #[inline]
    fn index_mut(&mut self, number: usize) -> &mut Entry {
        &mut self.chunks[number / Self::CHUNK][number % Self::CHUNK]
    }
}
