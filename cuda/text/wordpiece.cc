// BERT's WordPiece over printable ASCII. Whitespace ends everything that normalisation and words can reach, so what lies
// between two blanks, a chunk, has the same ids wherever it stands: chunks with any other character, or with a special
// token, are handed to the caller, who has somebody else's ids for them.
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "common/dispatch.h"

namespace tilerank {
namespace {

constexpr int64_t kMostLetters = 128;  // of a word that is looked up; longer ones are unknown
constexpr unsigned char kEnd = 0xff;   // of a text; no byte of UTF-8

enum Kind : unsigned char { kLetter, kMark, kBlank, kForeign };

// A piece of the vocabulary: itself where it has up to eight letters, else a digest of it.
struct Entry {
    uint64_t key = 0;
    int32_t id = -1;  // none
    uint32_t begin = 0;  // in the text of all pieces that are longer
};

// A word in lower case where the vocabulary is, with room to be read by eights.
struct Word {
    unsigned char bytes[kMostLetters + 8];
    int64_t length;
};

constexpr uint64_t kOnes = 0x0101010101010101u, kTops = 0x8080808080808080u;

// The top bit of each byte that is at least `least`; of bytes below 0x80.
constexpr uint64_t at_least(uint64_t eight, unsigned char least) { return eight + kOnes * (0x80 - least); }
constexpr uint64_t between(uint64_t eight, unsigned char first, unsigned char last) {
    return at_least(eight, first) & ~at_least(eight, static_cast<unsigned char>(last + 1)) & kTops;
}

uint64_t eight_bytes(const unsigned char* bytes) {
    uint64_t eight;
    std::memcpy(&eight, bytes, 8);
    return eight;
}

uint64_t first_bytes(uint64_t eight, int64_t count) { return count >= 8 ? eight : eight & ~(~uint64_t{0} << 8 * count); }

uint64_t mixed(uint64_t value) {
    value *= 0x9e3779b97f4a7c15u;
    return value ^ value >> 32;
}

uint64_t digest_of(const unsigned char* bytes, int64_t length) {
    uint64_t digest = static_cast<uint64_t>(length);
    for (; length > 0; length -= 8, bytes += 8) digest = mixed(digest ^ first_bytes(eight_bytes(bytes), length));
    return digest | uint64_t{1} << 63;  // no eight letters of ASCII
}

// Pieces that begin a word, or those that go on one.
struct Pieces {
    std::string text;
    std::vector<Entry> table;
    std::vector<uint64_t> seen;  // a bit for each hash: most pieces that do not exist end here
    int64_t longest = 0;
    int shift = 0;

    static constexpr uint64_t kSeenBits = 1 << 17;

    void reserve(size_t count) {
        int bits = 10;
        while (size_t{1} << bits < 2 * count) ++bits;
        shift = 64 - bits;
        table.assign(size_t{1} << bits, {});
        seen.assign(kSeenBits / 64, 0);
    }

    static uint64_t key_of(const unsigned char* bytes, int64_t length) {
        return length <= 8 ? first_bytes(eight_bytes(bytes), length) : digest_of(bytes, length);
    }

    // bytes can be read eight bytes beyond their end.
    void add(const unsigned char* bytes, int64_t length, int32_t id) {
        const uint64_t key = key_of(bytes, length), hash = mixed(key);
        size_t at = hash >> shift;
        while (table[at].id >= 0) at = (at + 1) & (table.size() - 1);
        table[at] = {key, id, static_cast<uint32_t>(text.size())};
        if (length > 8) text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
        if (length > longest) longest = length;
        seen[hash % kSeenBits / 64] |= uint64_t{1} << hash % 64;
    }

    int32_t find(const unsigned char* bytes, int64_t length) const {
        const uint64_t key = key_of(bytes, length), hash = mixed(key);
        if ((seen[hash % kSeenBits / 64] >> hash % 64 & 1) == 0) return -1;
        for (size_t at = hash >> shift; table[at].id >= 0; at = (at + 1) & (table.size() - 1)) {
            const Entry& entry = table[at];
            if (entry.key == key && (length <= 8 || is_at(entry.begin, bytes, length))) return entry.id;
        }
        return -1;
    }

  private:
    bool is_at(uint32_t begin, const unsigned char* bytes, int64_t length) const {
        return text.size() - begin >= static_cast<size_t>(length) &&
               std::memcmp(text.data() + begin, bytes, static_cast<size_t>(length)) == 0;
    }
};

}  // namespace
}  // namespace tilerank

struct tilerank_wordpiece {
    tilerank::Pieces pieces[2];  // of a word's begin, of its rest
    std::vector<std::string> special;
    bool begins_special[256] = {};
    tilerank::Kind kinds[256];
    unsigned char lower[256];
    bool lowercase = false;
    int64_t most_letters = 0;
    int32_t unknown = 0;
    int32_t marks[128];  // the id of each as a word

    void add(const char* piece, int64_t length, int32_t id) {
        // "##ing" goes on a word. By that very name it begins none: '#' is a mark.
        const bool is_rest = length > 2 && piece[0] == '#' && piece[1] == '#';
        if (is_rest) piece += 2, length -= 2;
        if (length < 1 || length > most_letters) return;  // never asked for, nor is what follows
        for (int64_t i = 0; i < length; ++i) {
            if (static_cast<unsigned char>(piece[i]) >= 0x80) return;
        }
        tilerank::Word word{};
        std::memcpy(word.bytes, piece, static_cast<size_t>(length));
        pieces[is_rest].add(word.bytes, length, id);
    }

    // Reads the word that begins at `at`, counting all of its letters, and returns where it ends.
    const unsigned char* read(const unsigned char* at, const unsigned char* end, tilerank::Word& word) const {
        using namespace tilerank;
        word.length = 0;
        while (end - at >= 8) {
            const uint64_t raw = eight_bytes(at), eight = raw & ~kTops;
            const uint64_t capitals = between(eight, 'A', 'Z');
            const uint64_t letters = (capitals | between(eight, 'a', 'z') | between(eight, '0', '9')) & ~raw;
            const uint64_t others = ~letters & kTops;
            const int count = others == 0 ? 8 : __builtin_ctzll(others) / 8;
            if (word.length < kMostLetters) {
                const uint64_t found = first_bytes(lowercase ? eight | capitals >> 2 : eight, count);
                std::memcpy(word.bytes + word.length, &found, 8);
            }
            word.length += count;
            at += count;
            if (count < 8) return at;
        }
        for (; at < end && kinds[*at] == kLetter; ++at, ++word.length) {
            if (word.length < kMostLetters) word.bytes[word.length] = lower[*at];
        }
        return at;
    }

    // Writes the ids of a word and returns where they end: the longest piece first, again and again; unknown as a whole
    // where a rest has no piece.
    int32_t* encode(const tilerank::Word& word, int32_t* ids) const {
        int32_t* end = ids;
        for (int64_t at = 0; at < word.length;) {
            const tilerank::Pieces& known = pieces[at > 0];
            int64_t length = word.length - at < known.longest ? word.length - at : known.longest;
            int32_t id = -1;
            for (; length > 0 && (id = known.find(word.bytes + at, length)) < 0; --length) {
            }
            if (id < 0) {
                *ids = unknown;
                return ids + 1;
            }
            *end++ = id;
            at += length;
        }
        return end;
    }

    // Whether a special token begins here.
    bool is_special(const unsigned char* at, const unsigned char* end) const {
        for (const std::string& token : special) {
            if (static_cast<size_t>(end - at) >= token.size() && std::memcmp(at, token.data(), token.size()) == 0) {
                return true;
            }
        }
        return false;
    }

    bool is_foreign(const unsigned char* at, const unsigned char* end) const {
        return kinds[*at] == tilerank::kForeign || (begins_special[*at] && is_special(at, end));
    }

    // The end of the chunk that goes on at `at`.
    const unsigned char* chunk_end(const unsigned char* at, const unsigned char* end) const {
        while (at < end && kinds[*at] != tilerank::kBlank) ++at;
        return at;
    }
};

tilerank_status tilerank_wordpiece_create(const tilerank_wordpiece_params* params, tilerank_wordpiece** made) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    REQUIRE(made != nullptr, "made is NULL; it must point to where the answer goes");
    REQUIRE(params->count >= 1 && params->count < (1 << 28), "count is %lld; allowed: 1 to 2^28",
            static_cast<long long>(params->count));
    REQUIRE(params->special_count >= 0, "special_count is %lld; allowed: 0 and above",
            static_cast<long long>(params->special_count));
    REQUIRE(params->most_letters >= 1 && params->most_letters <= kMostLetters,
            "most_letters is %lld; allowed: 1 to %lld", static_cast<long long>(params->most_letters),
            static_cast<long long>(kMostLetters));
    REQUIRE(params->pieces != nullptr && params->ends != nullptr, "pieces or ends is NULL; they are the vocabulary");
    auto* words = new (std::nothrow) tilerank_wordpiece;
    REQUIRE(words != nullptr, "there is no memory for the vocabulary");
    words->unknown = params->unknown;
    words->lowercase = params->lowercase != 0;
    words->most_letters = params->most_letters;
    for (int byte = 0; byte < 256; ++byte) {
        const bool is_capital = byte >= 'A' && byte <= 'Z';
        const bool is_word = is_capital || (byte >= 'a' && byte <= 'z') || (byte >= '0' && byte <= '9');
        words->lower[byte] = static_cast<unsigned char>(is_capital && params->lowercase ? byte + 32 : byte);
        words->kinds[byte] = byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r' || byte == kEnd ? kBlank
                             : byte < 0x20 || byte >= 0x7f                                               ? kForeign
                             : is_word                                                                   ? kLetter
                                                                                                         : kMark;
    }
    for (Pieces& pieces : words->pieces) pieces.reserve(static_cast<size_t>(params->count));
    int64_t begin = 0;
    for (int64_t id = 0; id < params->count; ++id) {
        words->add(params->pieces + begin, params->ends[id] - begin, static_cast<int32_t>(id));
        begin = params->ends[id];
    }
    for (int byte = 0; byte < 128; ++byte) {
        const unsigned char mark[8] = {static_cast<unsigned char>(byte)};
        const int32_t id = words->pieces[0].find(mark, 1);
        words->marks[byte] = id < 0 ? words->unknown : id;
    }
    begin = 0;
    for (int64_t i = 0; i < params->special_count; ++i) {
        words->special.emplace_back(params->special + begin, params->special + params->special_ends[i]);
        begin = params->special_ends[i];
        if (!words->special.back().empty()) {
            words->begins_special[static_cast<unsigned char>(words->special.back()[0])] = true;
        }
    }
    *made = words;
    return TILERANK_OK;
}

void tilerank_wordpiece_destroy(tilerank_wordpiece* words) { delete words; }

tilerank_status tilerank_wordpiece_foreign(const tilerank_wordpiece* words, const char* texts, int64_t bytes,
                                           const char* separator, char* chunks, int64_t most, int64_t* used,
                                           int64_t* count) {
    using namespace tilerank;
    const auto* at = reinterpret_cast<const unsigned char*>(texts);
    const unsigned char *begin = at, *end = at + bytes;
    const int64_t gap = static_cast<int64_t>(std::strlen(separator));
    int64_t found = 0, size = 0;
    while (at < end) {
        // Eight printable bytes at a time that begin no special token.
        if (end - at >= 8) {
            bool is_plain = true;
            for (int i = 0; i < 8; ++i) is_plain &= words->kinds[at[i]] != kForeign && !words->begins_special[at[i]];
            if (is_plain) {
                at += 8;
                continue;
            }
        }
        if (!words->is_foreign(at, end)) {
            ++at;
            continue;
        }
        const unsigned char* first = at;
        while (first > begin && words->kinds[first[-1]] != kBlank) --first;
        at = words->chunk_end(at, end);
        const int64_t length = at - first, before = found > 0 ? gap : 0;
        REQUIRE(size + before + length <= most, "most is %lld bytes, too few for the chunks",
                static_cast<long long>(most));
        std::memcpy(chunks + size, separator, static_cast<size_t>(before));
        std::memcpy(chunks + size + before, first, static_cast<size_t>(length));
        size += before + length;
        ++found;
    }
    *used = size;
    *count = found;
    return TILERANK_OK;
}

tilerank_status tilerank_wordpiece_encode(const tilerank_wordpiece* words, const char* texts, int64_t bytes,
                                          const int32_t* foreign, int64_t foreign_count, int32_t separator,
                                          int32_t* ids, int64_t* ends, int64_t count) {
    using namespace tilerank;
    const auto* at = reinterpret_cast<const unsigned char*>(texts);
    const unsigned char* end = at + bytes;
    const int32_t *other = foreign, *other_end = foreign + foreign_count;
    int32_t* next = ids;
    int32_t* chunk = ids;  // the ids of the chunk under way
    int64_t text = 0;
    Word word;
    while (true) {
        const unsigned char byte = at < end ? *at : kEnd;
        switch (words->kinds[byte]) {
            case kLetter: {
                at = words->read(at, end, word);
                if (word.length > words->most_letters) {
                    *next++ = words->unknown;
                } else {
                    next = words->encode(word, next);
                }
                continue;
            }
            case kMark:
                if (!words->begins_special[byte] || !words->is_special(at, end)) {
                    *next++ = words->marks[byte];
                    ++at;
                    continue;
                }
                [[fallthrough]];
            case kForeign:
                next = chunk;
                for (; other < other_end && *other != separator; ++other) *next++ = *other;
                if (other < other_end) ++other;
                at = words->chunk_end(at, end);
                continue;
            default:
                break;
        }
        if (byte == kEnd) {
            REQUIRE(text < count, "there are more texts than count, %lld", static_cast<long long>(count));
            ends[text++] = next - ids;
            if (at == end) break;
        }
        chunk = next;
        ++at;
    }
    REQUIRE(text == count, "there are %lld texts and count is %lld", static_cast<long long>(text),
            static_cast<long long>(count));
    return TILERANK_OK;
}
