/* The pinned socket map through which a tagged connection asks for the counter option. */
#ifndef CHECKMATE_COUNTER_MAP_H
#define CHECKMATE_COUNTER_MAP_H

#include <stdbool.h>

/* Registers a socket, before connect(). False: nothing can be tagged; the first time, a warning says why. */
bool ckm_counter_register(int socket);

/* After connect(): does the program write the option on this socket? */
bool ckm_counter_armed(int socket);

#endif
