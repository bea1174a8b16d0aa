// attention_tile of every format that is stored and every dtype.
#include "../attention/tile.h"

#include "../entry.h"
#include "../formats/all.h"

#define MM_STORED_FORMAT(name, Struct) \
  MM_EACH_DTYPE(MM_ATTENTION, attention_tile, name, Struct, AttentionTile)
#include "../formats/each_stored.h"
