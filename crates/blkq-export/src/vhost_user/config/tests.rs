use super::*;

fn limits() -> QueueLimits {
    QueueLimits {
        capacity_bytes: 10 << 20,
        logical_block_bytes: 4096,
        physical_block_bytes: 16384,
        io_opt_bytes: 65536,
        max_discard_bytes: u64::MAX,
        discard_granularity: 8192,
        max_write_zeroes_bytes: 1 << 20,
        write_cache: true,
        ..QueueLimits::default()
    }
}

fn word(bytes: &[u8; CONFIG_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[test]
fn every_limit_has_its_field() {
    let bytes = config(&limits(), 4, true);
    // Capacity in sectors of 512 bytes, although the block is larger.
    assert_eq!((word(&bytes, 0), word(&bytes, 4)), (20480, 0));
    assert_eq!((word(&bytes, 8), word(&bytes, 12)), (1 << 23, SEGMENTS_MAX));
    assert!(u64::from(word(&bytes, 8)) * u64::from(word(&bytes, 12)) <= 1 << 30, "a request");
    assert_eq!(word(&bytes, 20), 4096);
    // Topology: the exponent of the physical block, no offset, the least and the best size in blocks.
    assert_eq!((&bytes[24..26], &bytes[26..28], word(&bytes, 28)), (&[2, 0][..], &[4, 0][..], 16));
    assert_eq!((bytes[32], bytes[33], &bytes[34..36]), (1, 0, &[4, 0][..]));
    assert_eq!((word(&bytes, 36), word(&bytes, 40), word(&bytes, 44)), ((1 << 30) >> 9, 32, 16));
    // Not the driver's 1 MiB, by which the layer splits.
    assert_eq!((word(&bytes, 48), word(&bytes, 52), bytes[56]), ((1 << 30) >> 9, 32, 1));
    assert_eq!(config(&limits(), 4, false)[WRITEBACK_AT], 0);
    // The guest does not see the part of a block at the end.
    let odd = QueueLimits { padding_bytes: 100, ..limits() };
    assert_eq!(word(&config(&odd, 1, true), 0), 20480 - 8);
}

#[test]
fn features_follow_the_limits() {
    let usual = SEG_MAX | SIZE_MAX | BLK_SIZE | TOPOLOGY | FLUSH | CONFIG_WCE | MQ;
    let rings = RING_INDIRECT_DESC | RING_EVENT_IDX | VERSION_1 | RING_PACKED;
    assert_eq!(features(&limits()), usual | rings | DISCARD | WRITE_ZEROES);
    let plain = QueueLimits { max_discard_bytes: 0, max_write_zeroes_bytes: 0, ..limits() };
    assert_eq!(features(&plain), usual | rings | WRITE_ZEROES);
    // Without a write zeroes operation of the driver, the block layer writes zeroes.
    assert_eq!(word(&config(&plain, 1, true), 48), (1 << 30) >> 9);
    assert_eq!((word(&config(&plain, 1, true), 36), config(&plain, 1, true)[56]), (0, 0));
    let read_only = QueueLimits { read_only: true, ..limits() };
    assert_eq!(features(&read_only), usual | rings | RO);
    assert_eq!((word(&config(&read_only, 1, true), 36), word(&config(&read_only, 1, true), 48)), (0, 0));
}
