"""What becomes of what a worker keeps: who may find it in memory, what is written to files, what must be forgotten?

The host alone decides about files: a worker offers nodes, and writes those it is told to. A scope that was erased is never written
for again, also when a file of it was on its way.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import replace

from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash, Scope, block_hashes
from runtime.prefix.hits import RESERVED_BYTES as COUNTER_BYTES
from runtime.prefix.plans import Entry
from runtime.protocol.commands import Forget, Publish, Unpin
from runtime.protocol.events import Kept, KeptNode, PrefixFacts, SegmentPublished, SegmentRejected
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.book import Book
from runtime.scheduler.model import Model
from runtime.scheduler.prefixes import Pin, Promise
from runtime.scheduler.request import Sequence, known_tokens
from runtime.scheduler.stimuli import DeleteFiles, EraseTenant, FilesSeen

# -- what a worker says -----------------------------------------------------------------------------------------


def kept(book: Book, model: Model, sequence: Sequence, event: Kept) -> None:
    """Also of a sequence that is over: its worker says so before it says Released."""
    record = sequence.record
    if not sequence.keeps:
        book.breach(model, f"kept sequence {sequence.id}, which it was not told to keep")
        return
    if not 0 <= event.pinned_length <= event.length:
        book.breach(model, f"kept sequence {sequence.id}: length {event.length}, pinned {event.pinned_length}")
        return
    if sequence.leads:
        book.look_again(model)  # a follower may have all it waits for
    secret = record.secret
    if secret is None or record.scope is None:
        return  # erased meanwhile
    tokens = known_tokens(sequence)
    length = min(event.length, len(tokens))  # what it drew after we let it go is not known here
    model.hints.note(sequence.id, secret, tokens, length)
    if record.request.prefill_only and event.pinned_length:
        _pin(book, model, sequence, min(event.pinned_length, length))
    if event.nodes and book.prefixes.has_files:
        _publish(book, model, sequence, tokens, event.nodes)


def _pin(book: Book, model: Model, sequence: Sequence, length: int) -> None:
    record = sequence.record
    if record.is_unpinned:
        book.send(model, Unpin((sequence.id,)))
        return
    assert record.scope is not None
    record.pinned_length = length
    chain = record.chain[: length // BLOCK_TOKENS]
    book.prefixes.pin(Pin(record.request.id, model.name, sequence.id, record.scope, chain, length))


def _publish(book: Book, model: Model, sequence: Sequence, tokens: TokenIds, nodes: List[KeptNode]) -> None:
    """Have those written that there is room for and no file of."""
    record, facts = sequence.record, _facts(model)
    assert facts is not None
    assert record.secret is not None
    assert record.scope is not None
    nodes = [node for node in nodes if node.end <= len(tokens)]
    if any(not 0 <= node.start < node.end or node.start % BLOCK_TOKENS or node.end % BLOCK_TOKENS for node in nodes):
        book.breach(model, f"kept sequence {sequence.id} in nodes that are no whole blocks")
        return
    if len({node.node for node in nodes}) < len(nodes):
        book.breach(model, f"kept sequence {sequence.id} in nodes of the same number")
        return
    end = max((node.end for node in nodes), default=0)
    chain = record.chain if end <= len(record.chain) * BLOCK_TOKENS else block_hashes(record.secret, tokens[:end])
    wanted: list[tuple[int, str]] = []
    for node in sorted(nodes, key=lambda node: node.start):  # what another continues comes before it
        entry = _entry(facts, record.scope, chain, node)
        if entry.name in book.prefixes.index or entry.name in book.prefixes.promised:
            continue
        if node.node in model.promises:
            book.breach(model, f"kept sequence {sequence.id} in node {node.node}, whose number is another's")
            break
        if _is_reachable(book, entry) and _make_room(book, entry):
            promise = Promise(entry, record.scope, record.request.id, record.request.tenant)
            book.prefixes.promised.add(entry.name)
            model.promises[node.node] = promise
            if parents := book.prefixes.index.plans(chain[: node.start // BLOCK_TOKENS], node.start + 1):
                book.prefixes.index.lease(promise.holder, parents[-1])
            wanted.append((node.node, record.scope.owner_tag(entry.name)))
    if wanted:
        book.send(model, Publish(tuple(wanted)))


def _entry(facts: PrefixFacts, scope: Scope, chain: List[BlockHash], node: KeptNode) -> Entry:
    first, last = node.start // BLOCK_TOKENS, node.end // BLOCK_TOKENS
    head_bytes = facts.head_bytes + (last - first) * facts.block_head_bytes
    payload_bytes = (node.end - node.start) * facts.slice_bytes_per_token + facts.checkpoint_bytes
    return Entry(
        fingerprint=facts.fingerprint,
        tenant=scope.tenant,
        parent=chain[first - 1] if first else None,
        start=node.start,
        blocks=tuple(chain[first:last]),
        style=facts.style,
        num_bytes=payload_bytes + head_bytes + COUNTER_BYTES,
        checkpoint_bytes=facts.checkpoint_bytes,
    )


def _is_reachable(book: Book, entry: Entry) -> bool:
    """Whether what it continues is there or on its way. A file behind a gap could not be restored by anyone."""
    if entry.parent is None or entry.style == "checkpoint" or book.prefixes.index.holds(entry.parent):
        return True
    promises = (promise for model in book.models.values() for promise in model.promises.values())
    if any(entry.parent in promise.entry.blocks for promise in promises if not promise.is_erased):
        return True
    book.prefixes.counts[entry.tenant].rejected["no_parent"] += 1
    return False


def _make_room(book: Book, entry: Entry) -> bool:
    prefixes = book.prefixes
    victims = prefixes.index.make_room(entry.name, entry.num_bytes, entry.tenant, entry.parent, prefixes.free_bytes)
    if victims is None:
        prefixes.counts[entry.tenant].rejected["no_room"] += 1
        return False
    _delete(book, victims, is_eviction=True)
    return True


def published(book: Book, model: Model, event: SegmentPublished) -> None:
    promise = model.promises.pop(event.node, None)
    if promise is None:
        return  # said before
    if event.name != promise.entry.name or event.num_bytes < 0:
        model.promises[event.node] = promise
        book.breach(model, f"published node {event.node} under a name that is not its own")
        return
    entry = replace(promise.entry, num_bytes=event.num_bytes + COUNTER_BYTES)
    if promise.is_erased:
        book.out.append(DeleteFiles((entry,)))
        return
    prefixes = book.prefixes
    prefixes.index.add(entry)
    prefixes.settle_promise(promise)
    prefixes.counts[entry.tenant].published += 1
    if event.is_new:
        prefixes.free_bytes = max(0, prefixes.free_bytes - entry.num_bytes)
    for pin in list(prefixes.pins.values()):
        if entry.name in pin.chain:
            prefixes.pin(pin)


def rejected(book: Book, model: Model, event: SegmentRejected) -> None:
    promise = model.promises.pop(event.node, None)
    if promise is not None and not promise.is_erased:
        book.prefixes.break_promise(promise)
        book.prefixes.counts[promise.entry.tenant].rejected[event.reason] += 1


# -- what the directory holds -----------------------------------------------------------------------------------


def files_seen(book: Book, stimulus: FilesSeen) -> None:
    prefixes = book.prefixes
    for name in stimulus.gone:
        prefixes.index.drop(name)
    for entry in stimulus.added:
        prefixes.index.add(entry)
    prefixes.index.use(stimulus.used)
    prefixes.free_bytes = stimulus.free_bytes
    _delete(book, prefixes.index.excess(stimulus.free_bytes), is_eviction=True)


def _delete(book: Book, entries: List[Entry], *, is_eviction: bool) -> None:
    if not entries:
        return
    book.out.append(DeleteFiles(tuple(entries)))
    # Else the next file's room would be made again, and again, until the disk is looked at.
    book.prefixes.free_bytes += sum(entry.num_bytes for entry in entries)
    for entry in entries if is_eviction else ():
        book.prefixes.counts[entry.tenant].evictions += 1


# -- erasing ----------------------------------------------------------------------------------------------------


def erase(book: Book, stimulus: EraseTenant) -> None:
    """Its running requests go on, and find and keep nothing any more."""
    scope, prefixes = stimulus.scope, book.prefixes
    _delete(book, prefixes.index.erase(stimulus.tenant), is_eviction=False)
    for pin in [pin for pin in prefixes.pins.values() if pin.scope == scope]:
        prefixes.unpin(pin.request)
    for record in book.requests.values():
        if record.scope == scope:
            record.scope, record.secret, record.chain, record.following = None, None, [], None
    for model in book.models.values():
        for promise in model.promises.values():
            if promise.scope == scope and not promise.is_erased:
                prefixes.break_promise(promise)
                promise.is_erased = True
        facts = _facts(model)
        if facts is not None:
            secret = scope.secret(facts.fingerprint)
            model.hints.forget(secret)
            if model.can_work:
                book.send(model, Forget((secret,)))
        book.look_again(model)


def _facts(model: Model) -> PrefixFacts | None:
    return None if model.facts is None else model.facts.prefix
