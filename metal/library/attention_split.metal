// attention_split of every format that is stored and every dtype.
#include "../attention/split.h"

#include "../entry.h"
#include "../formats/all.h"

#define MM_STORED_FORMAT(name, Struct) \
  MM_EACH_DTYPE(MM_ATTENTION, attention_split, name, Struct, AttentionSplit)
#include "../formats/each_stored.h"
